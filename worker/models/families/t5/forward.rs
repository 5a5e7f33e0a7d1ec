//! `cox model forward` for a T5: one forward pass from file to file, so that anyone can hold us against
//! another implementation.
//!
//! In: `input_ids` and `attention_mask` `[b, s]`, `labels` `[b, t]`, i64, -100 where nothing is predicted.
//!
//! | out | shape | what |
//! |---|---|---|
//! | `encoder_last_hidden_state` | `[b, s, d]` | after the encoder's norm |
//! | `logits` | `[b, t, vocab]` | float32 |
//! | `loss` | `[]` | mean over labels other than -100 |
//! | `grad.{key}` | as the parameter | with an adapter: gradients of its tensors |
//!
//! With `dropout_rows` `[b, s]` and `decoder_dropout_rows` `[b, t]` among the inputs, i64, the adapter drops
//! what its `lora_dropout` says, by these words of the tokens (`kernels::dropout`). It is the pass of
//! training, not one of its own.

use coxswain_nn::{
    kernels::{
        Tape,
        flat::{Flat, FlatOn},
        pool,
    },
    lora::PeftAdapter,
    params::{FlatGrads, GradientSums, TrainableLayout, Trainables},
    recompute::Retention,
};
use coxswain_proto::run_spec::Recompute;

use super::{
    config::T5Config,
    context::{T5Context, TextRows},
    inputs::SeqInputs,
    model::T5,
    modules::modules,
    pass::T5Run,
};
use crate::{
    pretrained::{error::ModelError, job::ForwardJob, results::Results, trains::Trains},
    text_to_text::Texts,
};

/// Reads a model, an optional PEFT adapter and inputs; writes every result.
pub fn run<B: Tape<Base = B>>(job: &ForwardJob<'_>, device: &B::Device) -> Result<(), ModelError> {
    pool::join();
    let config = T5Config::from_dir(job.model)?;
    let inputs = SeqInputs::read(job.inputs, &config)?;
    let adapter = job.adapter.map(|dir| PeftAdapter::read(dir, &modules(&config))).transpose()?;
    let mut layout = TrainableLayout::default();
    let trains = Trains {
        lora: adapter.as_ref().map(PeftAdapter::plan),
        full: adapter.as_ref().map(PeftAdapter::saved),
    };
    let model = T5::<B>::load(job.model, job.dtype, trains, &mut layout, device)?;
    let mut values = layout.initial_values(0);
    if let Some(adapter) = &adapter {
        adapter.fill(&layout, &mut values)?;
    }
    let trainables = Trainables::new(layout, values, device);
    Comparison { model: &model, inputs: &inputs, trainables: &trainables }.results().write(job.out)
}

struct Comparison<'a, B: Tape<Base = B>> {
    model: &'a T5<B>,
    inputs: &'a SeqInputs,
    trainables: &'a Trainables<B>,
}

impl<B: Tape<Base = B>> Comparison<'_, B> {
    fn results(&self) -> Results {
        let Self { model, inputs, trainables } = self;
        let SeqInputs { batch, source, seen, target, targets, dropout_rows } = inputs;
        let texts = Texts { batch: *batch, source, seen, target };
        let rows = dropout_rows.clone().map(|words| TextRows::of_words(words, &model.device));
        let context = T5Context::of_training(model, trainables, &texts).dropping(rows);
        let retention = Retention::in_float32(Recompute::None);
        let run = T5Run { model, context: &context, trainables, retention };
        let axes = |ids: &[u32], width| vec![*batch, ids.len() / batch, width];
        let mut results = Results::default();
        let (hidden_nd, trace) = run.forward(&texts, &mut |_| {});
        let memory = trace.memory().clone();
        results.tensor("encoder_last_hidden_state", memory, axes(source, model.config.d_model));
        let logits = model.logits(trainables, hidden_nd.clone());
        results.tensor("logits", logits, axes(target, model.config.vocab_size));
        let layout = trainables.layout();
        let mut flat = FlatGrads::<B::Flat>::at(&B::Flat::place(&trainables.device()), layout.len());
        let grads: Option<&mut dyn GradientSums<B>> = (!layout.is_empty()).then_some(&mut flat);
        let found = model.predict(trainables, hidden_nd, targets, grads);
        let count = found.rows.len() as f64;
        let loss = found.rows.iter().map(|[loss, _]| f64::from(*loss)).sum::<f64>() / count;
        results.floats("loss", &[loss as f32], vec![]);
        if let Some(dhidden_nd) = found.dhidden {
            // Of the losses' sum, as the head's own gradient is by now.
            run.backward(trace, dhidden_nd, &mut flat, &mut |_| {});
            for param in layout.params() {
                let sums = flat.values().read(param.range());
                let means: Vec<f32> = sums.iter().map(|sum| sum / count as f32).collect();
                results.floats(&format!("grad.{}", param.name), &means, param.shape.clone());
            }
        }
        results
    }
}
