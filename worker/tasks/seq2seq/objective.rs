//! The model as the engine trains it.

use std::path::Path;

use coxswain_models::{pretrained::adapters::readme, text_to_text::likeliest};
use coxswain_nn::{
    kernels::Tape,
    lora::AdapterOrigin,
    params::{GradientSums, TrainableLayout, Trainables},
};
use coxswain_proto::run_spec::RunSpec;
use coxswain_task::{
    Artifact, Batch, Evaluation, Example, Fault, MicroLoss, Module, Objective, PartSum, Samples, StageClock,
    TaskError, TextPair,
};

use super::{
    config::Seq2SeqSettings,
    data::{PairBatch, Pairs},
    model::{PairModel, tuned},
    rouge,
};
use crate::{pretrained, tokens::sums::TokenSums};

/// What held-out pairs are measured by: nats for each token of a target, and how many of these tokens are the
/// likeliest at their place. ROUGE is told beside them: it counts texts, not tokens.
const MEASURES: [&str; 2] = ["loss", "token_accuracy"];

/// Longest answer that people are shown.
const SHOWN_TOKENS: usize = 64;

/// What PEFT wraps such a model in, and Transformers reads it with.
const TASK_TYPE: &str = "SEQ_2_SEQ_LM";
const MODEL_CLASS: &str = "AutoModelForSeq2SeqLM";

/// A model, and the run that it is trained by.
pub(super) struct Seq2SeqObjective<B: Tape<Base = B>> {
    pub(super) model: PairModel<B>,
    pub(super) spec: RunSpec,
    pub(super) settings: Seq2SeqSettings,
}

impl<B: Tape<Base = B>> Seq2SeqObjective<B> {
    /// What the model writes for the sources of a batch, at most so many tokens each.
    fn answers(
        &self,
        trainables: &Trainables<B>,
        batch: &PairBatch,
        most: usize,
    ) -> Result<Vec<Vec<u32>>, TaskError> {
        let answers = self.model.write(trainables, batch, most, &mut |_, _, logits| likeliest(logits));
        answers.map_err(|error| TaskError::new(Fault::Numeric, error))
    }

    /// ROUGE of what the model writes for the sources of a batch, a sum for each of [`rouge::NAMES`].
    fn rouge(
        &self,
        trainables: &Trainables<B>,
        batch: &PairBatch,
        pairs: &Pairs,
    ) -> Result<Vec<PartSum>, TaskError> {
        let answers = self.answers(trainables, batch, self.settings.data.max_target_tokens)?;
        let mut sums = [PartSum::default(); 3];
        for (&index, answer) in batch.indices.iter().zip(&answers) {
            let reference = pairs.texts(index).map_err(TaskError::bad_input)?.target;
            let answer = pairs.tokenizer().text(answer).map_err(TaskError::bad_input)?;
            for (sum, found) in sums.iter_mut().zip(rouge::of(&answer, &reference)) {
                *sum = PartSum { count: sum.count + 1.0, sum: sum.sum + found };
            }
        }
        Ok(sums.into())
    }
}

impl<B: Tape<Base = B>> Objective<B> for Seq2SeqObjective<B> {
    fn forward_backward(
        &self,
        trainables: &Trainables<B>,
        batch: &dyn Batch,
        grads: &mut dyn GradientSums<B>,
        clock: &mut StageClock<'_>,
    ) -> Result<MicroLoss, TaskError> {
        self.model.forward_backward(trainables, batch.content(), grads, clock)
    }

    fn loss(&self, trainables: &Trainables<B>, batch: &dyn Batch) -> Result<MicroLoss, TaskError> {
        Ok(self.model.losses(trainables, batch.content())?.loss())
    }

    fn measures(&self) -> &'static [&'static str] {
        &MEASURES
    }

    fn parts(&self) -> Vec<String> {
        let names: &[&str] = if self.settings.eval.rouge { &rouge::NAMES } else { &[] };
        names.iter().map(|&name| name.to_owned()).collect()
    }

    fn evaluate(
        &self,
        trainables: &Trainables<B>,
        batch: &dyn Batch,
        samples: &dyn Samples,
    ) -> Result<Evaluation, TaskError> {
        let batch: &PairBatch = batch.content();
        let TokenSums { loss_sum, right, tokens } = self.model.losses(trainables, batch)?;
        let parts = match (self.settings.eval.rouge, samples.downcast_ref()) {
            (true, Some(pairs)) => self.rouge(trainables, batch, pairs)?,
            _ => Vec::new(),
        };
        Ok(Evaluation { count: tokens, sums: vec![loss_sum, right], parts })
    }

    fn examples(
        &self,
        trainables: &Trainables<B>,
        batch: &dyn Batch,
        samples: &dyn Samples,
    ) -> Result<Vec<Example>, TaskError> {
        let Some(pairs) = samples.downcast_ref::<Pairs>() else { return Ok(Vec::new()) };
        let batch: &PairBatch = batch.content();
        let most = self.settings.data.max_target_tokens.min(SHOWN_TOKENS);
        let answers = self.answers(trainables, batch, most)?;
        let example = |(&sample, answer): (&u64, &Vec<u32>)| {
            let pair = pairs.texts(sample).map_err(TaskError::bad_input)?;
            let predicted = pairs.tokenizer().text(answer).map_err(TaskError::bad_input)?;
            let text = TextPair { name: pair.source, reference: pair.target, predicted };
            Ok(Example { sample, texts: vec![text], ..Example::default() })
        };
        batch.indices.iter().zip(&answers).map(example).collect()
    }

    fn modules(&self, layout: &TrainableLayout) -> Vec<Module> {
        let dtype = self.settings.model.weights_dtype;
        let mut all = self.model.outline().tensors.clone();
        all.retain(|tensor| !self.model.full().trains(&tensor.name));
        let frozen = STACKS.map(|stack| {
            let of: Vec<_> = all.iter().filter(|tensor| stack_of(&tensor.name) == stack).collect();
            Module {
                module: stack.into(),
                tensors: of.len(),
                parameters: of.iter().map(|tensor| tensor.elements).sum(),
                trains: false,
                dtype: if stack.ends_with("coder") { dtype.name() } else { dtype.dense().name() },
                bytes: of.iter().map(|tensor| tensor.kept_bytes(dtype)).sum(),
            }
        });
        let frozen = frozen.into_iter().filter(|module| module.tensors > 0);
        frozen.chain(pretrained::trained_rows(layout, &STACKS, stack_of)).collect()
    }

    fn base(&self) -> &str {
        &self.settings.model.path
    }

    fn initial_values(&self, layout: &TrainableLayout) -> Result<Vec<f32>, TaskError> {
        let outline = self.model.outline();
        let tuned = tuned(&self.settings, outline).map_err(TaskError::bad_input)?;
        let (model, seed) = (&self.settings.model, self.spec.run.seed);
        pretrained::initial_values::<B>(&tuned, model, outline.rules, layout, seed)
    }

    fn export(
        &self,
        dir: &Path,
        layout: &TrainableLayout,
        values: &[f32],
    ) -> Result<Vec<Artifact>, TaskError> {
        let base_model = &self.settings.model.path;
        let readme = readme(base_model, MODEL_CLASS, "Fine-tuned by Coxswain on pairs of texts.");
        let tied = self.model.outline().tied.as_deref();
        let trained_above = Some(self.settings.model.weights_dtype);
        let origin =
            AdapterOrigin { base_model, task_type: Some(TASK_TYPE), readme: &readme, tied, trained_above };
        pretrained::leave(dir, self.model.lora(), layout, values, &origin)
    }
}

/// Parts of the model, as tables name them.
const STACKS: [&str; 4] = ["embedding", "encoder", "decoder", "head"];

/// The part that a tensor is of, by its name or PEFT's.
fn stack_of(tensor: &str) -> &'static str {
    let tensor = tensor.trim_start_matches("base_model.model.");
    match tensor.split('.').next() {
        Some("lm_head") => "head",
        Some("encoder") if !tensor.contains("embed_tokens") => "encoder",
        Some("decoder") if !tensor.contains("embed_tokens") => "decoder",
        _ => "embedding",
    }
}
