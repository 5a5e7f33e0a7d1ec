//! `cox model forward`: one forward pass from file to file, so that anyone can hold us against another
//! implementation.
//!
//! In and out are safetensors, named and shaped as in Transformers:
//!
//! | out | shape | what |
//! |---|---|---|
//! | `position_ids` | `[3, b, s]` i64 | rotary positions; 0 at padding |
//! | `image_features` | `[tokens, d]` | the merger's output, images in order (only with images) |
//! | `deepstack.{k}` | `[tokens, d]` | output of the merger of stream `k`, where the tower has streams |
//! | `lm.layer{i}` | `[b, s, d]` | output of decoder layer `i`, before a stream is added and the final norm |
//! | `last_hidden_state` | `[b, s, d]` | after the final norm |
//! | `logits` | `[b, s, vocab]` | float32 |
//! | `loss` | `[]` | with labels: shifted by one, mean over labels other than -100 |
//! | `grad.{key}` | as the parameter | with labels and an adapter: gradients of its tensors |
//!
//! With `dropout_rows` among the inputs, `[b, s]` i64, the adapter drops what its `lora_dropout` says, by
//! these words of the rows (`kernels::dropout`); without them nothing is dropped. Adapters of the vision
//! tower never drop here.
//!
//! Rows of padding are computed like any other; on the left, where a query has nothing to attend to,
//! attention gives zeros (Transformers gives whatever its mask arithmetic leaves there, which depends on the
//! attention implementation).

use std::{ops::ControlFlow, path::Path};

use burn::{
    backend::Autodiff,
    tensor::{Int, Tensor, TensorData, activation},
};

use super::{
    embed::ImageRows,
    inputs::ForwardInputs,
    model::TwoTowers,
    rope::RopeIndex,
    sizes::TowersConfig,
    vision::{MergerPlace, VisionStem, VisionTower},
};
use crate::{
    pretrained::{error::ModelError, job::ForwardJob, prompts::Rows, results::Results, trains::Trains},
    vision_language::LoadOptions,
};
use coxswain_nn::{
    block::Block,
    kernels::{
        DropoutRows, ModelBackend, Tape,
        flat::{Flat, FlatOn},
        pool,
    },
    lora::PeftAdapter,
    params::{FlatGrads, ParamScope, TrainableLayout, Trainables},
};

/// Labels of this value are not predicted.
const IGNORED_LABEL: i64 = -100;

/// Reads a model, an optional PEFT adapter and inputs; writes every intermediate result.
pub fn run<B: Tape<Base = B>, V: VisionTower<B>>(
    job: &ForwardJob<'_>,
    device: &B::Device,
) -> Result<(), ModelError> {
    pool::join();
    let config = V::Config::read(job.model)?;
    let (sizes, modules) = (config.sizes(), config.outline().modules);
    let batch = ForwardInputs::read(job.inputs, sizes.patch_values)?;
    let adapter = job.adapter.map(|dir| PeftAdapter::read(dir, &modules)).transpose()?;
    let mut layout = TrainableLayout::default();
    let options = LoadOptions { head: true, ..job.dtype.into() };
    let trains = Trains {
        lora: adapter.as_ref().map(PeftAdapter::plan),
        full: adapter.as_ref().map(PeftAdapter::saved),
    };
    let model = TwoTowers::<B, V>::load(job.model, options, trains, &mut layout, device)?;
    let index = model.rope_index(&batch.input_ids, Rows::Padded(&batch.valid), &batch.grids)?;
    let targets = Targets::new(&batch, sizes.text.vocab_size, job.inputs)?;
    let pass = Pass { model: &model, batch: &batch, index: &index, targets: targets.as_ref() };

    let mut values = layout.initial_values(0);
    if let Some(adapter) = &adapter {
        adapter.fill(&layout, &mut values)?;
    }
    let trainables = Trainables::new(layout, values, device);
    let results = match (&adapter, &targets) {
        (Some(_), Some(_)) => pass.with_gradients(&trainables)?,
        _ => {
            let params = ParamScope::<B>::frozen(&trainables);
            pass.run(&params, &params)?.into_results(&batch)
        }
    };
    results.write(job.out)
}

/// The tokens to predict: rows of the flattened sequence and the ids that follow them.
struct Targets {
    rows: Vec<i32>,
    ids: Vec<i32>,
}

impl Targets {
    fn new(batch: &ForwardInputs, vocab: usize, path: &Path) -> Result<Option<Self>, ModelError> {
        let Some(labels) = &batch.labels else { return Ok(None) };
        let mut targets = Self { rows: Vec::new(), ids: Vec::new() };
        let problem = |problem| ModelError::Input { path: path.into(), tensor: "labels", problem };
        for (cell, &label) in labels.iter().enumerate() {
            if cell % batch.seq == 0 || label == IGNORED_LABEL {
                continue;
            }
            if label < 0 || label >= vocab as i64 {
                return Err(problem(format!(
                    "token id {label} in row {} is outside the vocabulary ({vocab} entries)",
                    cell / batch.seq
                )));
            }
            targets.rows.push(cell as i32 - 1);
            targets.ids.push(label as i32);
        }
        if targets.rows.is_empty() {
            return Err(problem(format!(
                "every label is {IGNORED_LABEL} or first in its row: there is nothing to predict"
            )));
        }
        Ok(Some(targets))
    }

    fn loss<T: Tape>(&self, logits_nv: Tensor<T, 2>) -> Tensor<T, 1> {
        let device = logits_nv.device();
        let n = self.rows.len();
        let rows: Tensor<T, 1, Int> = Tensor::from_data(TensorData::new(self.rows.clone(), [n]), &device);
        let ids: Tensor<T, 2, Int> = Tensor::from_data(TensorData::new(self.ids.clone(), [n, 1]), &device);
        activation::log_softmax(logits_nv.select(0, rows), 1).gather(1, ids).mean().neg()
    }
}

/// One forward pass, on whichever tape.
struct Pass<'a, B: ModelBackend, V: VisionTower<B>> {
    model: &'a TwoTowers<B, V>,
    batch: &'a ForwardInputs,
    index: &'a RopeIndex,
    targets: Option<&'a Targets>,
}

/// What a pass leaves behind.
struct Trace<T: Tape> {
    position_ids: Vec<i64>,
    image_features: Option<Tensor<T, 2>>,
    streams: Vec<Tensor<T, 2>>,
    layers: Vec<Tensor<T, 2>>,
    last_hidden: Tensor<T, 2>,
    logits: Tensor<T, 2>,
    loss: Option<Tensor<T, 1>>,
}

impl<B: Tape<Base = B>, V: VisionTower<B>> Pass<'_, B, V> {
    /// With the parameters of the vision tower, and those of all else.
    fn run<T: Tape<Base = B>>(
        &self,
        vision: &ParamScope<'_, T>,
        params: &ParamScope<'_, T>,
    ) -> Result<Trace<T>, ModelError> {
        let (model, batch) = (self.model, self.batch);
        let mut x_nd = model.embed_tokens(params, &batch.input_ids);
        let (mut image_features, mut streams) = (None, vec![]);
        let rows = ImageRows::new(self.index.image_rows.clone(), batch.input_ids.len());
        if !batch.grids.is_empty() || !batch.pixel_values.is_empty() {
            let (features_md, streams_md) = self.image_features(vision)?;
            x_nd = rows.scatter(x_nd, features_md.clone());
            (image_features, streams) = (Some(features_md), streams_md);
        }
        let context = model.text.context(&self.index.position_ids, Rows::Padded(&batch.valid));
        let mut layers = Vec::with_capacity(model.text.layers.count());
        let stack = &model.text.layers;
        let x_nd = stack.fold(0..stack.count(), x_nd, |x_nd, index, layer| {
            let h_nd = layer.attention_half(params, x_nd, &context);
            let x_nd = layer.mlp_half(params, h_nd, &context);
            layers.push(x_nd.clone());
            ControlFlow::Continue(match streams.get(index) {
                Some(stream_md) => rows.add(x_nd, stream_md.clone()),
                None => x_nd,
            })
        })?;
        let last_hidden = model.text.final_norm(params, x_nd);
        let logits = model.lm_head(params, last_hidden.clone()).expect("the model was loaded with its head");
        let loss = self.targets.map(|targets| targets.loss(logits.clone()));
        let position_ids = self.index.position_ids.iter().map(|&p| p.into()).collect();
        Ok(Trace { position_ids, image_features, streams, layers, last_hidden, logits, loss })
    }

    /// The merger's output, and that of the mergers of streams.
    fn image_features<T: Tape<Base = B>>(
        &self,
        params: &ParamScope<'_, T>,
    ) -> Result<(Tensor<T, 2>, Vec<Tensor<T, 2>>), ModelError> {
        let vision = &self.model.vision;
        let (stem, leaves) = (vision.stem(), vision.leaves_behind());
        let context = stem.context(&self.batch.grids)?;
        let x_pi = stem.patches(&[&self.batch.pixel_values], &context)?;
        let x_pd = stem.embed(params, T::lift(x_pi), &context);
        let (blocks, mut streams) = (stem.blocks(), vec![]);
        let x_pd = blocks.fold(0..blocks.count(), x_pd, |x_pd, index, block| {
            let h_pd = block.attention_half(params, x_pd, &context);
            let x_pd = block.mlp_half(params, h_pd, &context);
            if leaves.get(streams.len()) == Some(&index) {
                let place = MergerPlace::Stream(streams.len());
                streams.push(vision.merge(params, x_pd.clone(), place, &context));
            }
            ControlFlow::Continue(x_pd)
        })?;
        Ok((vision.merge(params, x_pd, MergerPlace::Last, &context), streams))
    }

    /// The pass, recorded, and the gradient of its loss for every trainable.
    fn with_gradients(&self, trainables: &Trainables<B>) -> Result<Results, ModelError> {
        let device = trainables.device();
        let rows = self.batch.dropout_rows.clone();
        let rows = rows.map(|words| DropoutRows::new(words, (!B::ON_HOST).then_some(&device)));
        let vision = ParamScope::<Autodiff<B>>::tracked(trainables);
        let params = ParamScope::<Autodiff<B>>::tracked(trainables).dropping(rows);
        let trace = self.run(&vision, &params)?;
        let mut gradients = trace.loss.as_ref().expect("gradients are asked for only with labels").backward();
        let layout = trainables.layout();
        let place = B::Flat::place(&trainables.device());
        let mut flat = FlatGrads::<B::Flat>::at(&place, layout.len());
        vision.collect(&mut gradients, &mut flat);
        params.collect(&mut gradients, &mut flat);
        let mut results = trace.into_results(self.batch);
        for param in layout.params() {
            let values = flat.values().read(param.range());
            results.floats(&format!("grad.{}", param.name), &values, param.shape.clone());
        }
        Ok(results)
    }
}

impl<T: Tape> Trace<T> {
    fn into_results(self, batch: &ForwardInputs) -> Results {
        let (b, s) = (batch.batch(), batch.seq);
        let mut results = Results::default();
        results.integers("position_ids", &self.position_ids, vec![3, b, s]);
        if let Some(features) = self.image_features {
            let shape = features.dims().to_vec();
            results.tensor("image_features", features, shape);
        }
        for (number, stream) in self.streams.into_iter().enumerate() {
            let shape = stream.dims().to_vec();
            results.tensor(&format!("deepstack.{number}"), stream, shape);
        }
        for (number, layer) in self.layers.into_iter().enumerate() {
            let d = layer.dims()[1];
            results.tensor(&format!("lm.layer{number}"), layer, vec![b, s, d]);
        }
        let d = self.last_hidden.dims()[1];
        results.tensor("last_hidden_state", self.last_hidden, vec![b, s, d]);
        let vocab = self.logits.dims()[1];
        results.tensor("logits", self.logits, vec![b, s, vocab]);
        if let Some(loss) = self.loss {
            results.tensor("loss", loss, vec![]);
        }
        results
    }
}
