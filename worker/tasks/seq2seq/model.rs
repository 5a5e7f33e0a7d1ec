//! The model of a run: read, adapted, run forward and backward, writing.

use std::path::Path;

use coxswain_models::{
    Shelf,
    pretrained::{
        adapters::{Adapters, HeadAdapter, TunedModules},
        checkpoint::CheckpointDir,
        directory,
        error::ModelError,
        prompts::DropoutKeys,
        settings::Model,
    },
    text_to_text::{Choice, NoToken, TextModelOutline, TextPass, TextToText},
};
use coxswain_nn::{
    files::StoredTensor,
    kernels::{Tape, sizes::Sizes},
    lora::{LoraPlan, TrainedModules},
    params::{GradientSums, TrainableLayout, Trainables},
    recompute::Retention,
};
use coxswain_proto::run_spec::{Recompute, RunSpec};
use coxswain_task::{MicroLoss, Pass, StageClock, TaskError};

use super::{config::Seq2SeqSettings, data::PairBatch};
use crate::{
    pretrained,
    tokens::{memory::HEAD_STAGE, sums::TokenSums},
};

/// The model with what trains of it.
pub struct PairModel<B: Tape<Base = B>> {
    model: Box<dyn TextToText<B>>,
    lora: Option<LoraPlan>,
    full: TrainedModules,
    retention: Retention,
    seed: u64,
}

impl<B: Tape<Base = B>> PairModel<B> {
    /// Reads the model directory. Returns the model with the layout of everything that trains and the values
    /// it starts from; both are the same on every rank.
    pub fn load(
        spec: &RunSpec,
        settings: &Seq2SeqSettings,
        models: Shelf<B>,
        device: &B::Device,
    ) -> Result<(Self, TrainableLayout, Vec<f32>), TaskError> {
        let dir = &pretrained::directory::<B>(&settings.model.path).map_err(TaskError::bad_input)?;
        let family = models.text_to_text.of(dir).map_err(TaskError::bad_input)?;
        let outline = family.outline(dir).map_err(TaskError::bad_input)?;
        let tuned = tuned(settings, &outline).map_err(TaskError::bad_input)?;
        let mut layout = TrainableLayout::default();
        let dtype = settings.model.weights_dtype;
        let model = family.load(dir, dtype, tuned.trains(), &mut layout, device);
        let model = model.map_err(TaskError::bad_input)?;
        let checkpoint = CheckpointDir { path: dir, rules: outline.rules };
        let values = tuned.initial_values::<B>(spec.run.seed, &layout, checkpoint, dtype);
        let values = values.map_err(TaskError::bad_input)?;
        let retention =
            Retention { recompute: spec.train.recompute, activations: settings.model.activations_dtype };
        let TunedModules { adapters, full } = tuned;
        let lora = adapters.map(|Adapters { plan, .. }| plan);
        Ok((Self { model, lora, full, retention, seed: spec.run.seed }, layout, values))
    }

    /// Adapters, if it has any.
    pub fn lora(&self) -> Option<&LoraPlan> {
        self.lora.as_ref()
    }

    /// What of it trains in full.
    pub fn full(&self) -> &TrainedModules {
        &self.full
    }

    /// The model as its configuration has it.
    pub fn outline(&self) -> &TextModelOutline {
        self.model.outline()
    }

    /// Runs one micro-batch and adds the gradient of its loss *sum* to `grads`.
    pub fn forward_backward(
        &self,
        trainables: &Trainables<B>,
        batch: &PairBatch,
        grads: &mut dyn GradientSums<B>,
        clock: &mut StageClock<'_>,
    ) -> Result<MicroLoss, TaskError> {
        if batch.targets.rows.is_empty() {
            return Ok(MicroLoss::default());
        }
        clock.enter(Pass::Forward);
        let run = self.model.run(TextPass { dropout: self.dropout(batch), ..self.pass(trainables, batch) });
        let (rows, trace) = run.forward(grads, &mut |stage| clock.lap(stage), HEAD_STAGE);
        let loss = sums(batch, &rows)?.loss();

        clock.enter(Pass::Backward);
        trace.backward(grads, &mut |stage| clock.lap(stage));
        Ok(loss)
    }

    /// Losses of a batch without a trace.
    pub fn losses(&self, trainables: &Trainables<B>, batch: &PairBatch) -> Result<TokenSums, TaskError> {
        if batch.targets.rows.is_empty() {
            return Ok(TokenSums::default());
        }
        // Nothing is kept for a backward pass, and every value is the one that a training pass computes.
        let retention = Retention { recompute: Recompute::None, ..self.retention };
        sums(batch, &self.model.losses(TextPass { retention, ..self.pass(trainables, batch) }))
    }

    /// Answers to the sources of a batch, each up to its end or to `most` tokens.
    pub fn write(
        &self,
        trainables: &Trainables<B>,
        batch: &PairBatch,
        most: usize,
        choose: Choice<'_>,
    ) -> Result<Vec<Vec<u32>>, NoToken> {
        self.model.write(trainables, &batch.texts(), most, choose)
    }

    fn pass<'a>(&self, trainables: &'a Trainables<B>, batch: &'a PairBatch) -> TextPass<'a, B> {
        let (texts, targets, retention) = (batch.texts(), &batch.targets, self.retention);
        TextPass { texts, targets, trainables, retention, dropout: None }
    }

    /// What keys the draws of the adapters' dropout; none where they drop nothing.
    fn dropout<'b>(&self, batch: &'b PairBatch) -> Option<DropoutKeys<'b>> {
        let drops = self.lora.as_ref().is_some_and(|plan| plan.recipe().dropout > 0.0);
        let (step, samples) = (batch.step.0, &batch.indices[..]);
        drops.then_some(DropoutKeys { seed: self.seed, step, samples, images_per_row: &[] })
    }
}

/// What trains of the model, by a run's settings.
pub(super) fn tuned(
    settings: &Seq2SeqSettings,
    model: &TextModelOutline,
) -> Result<TunedModules, ModelError> {
    let head = HeadAdapter::InFull("which cannot have an adapter in this task");
    TunedModules::resolve(settings.lora.as_ref(), &settings.model.train, &model.modules, head)
}

/// What a run of this task has left at `path`, under the names that this run's layout has.
pub(super) fn read_left(
    Seq2SeqSettings { model, lora, .. }: &Seq2SeqSettings,
    models: Shelf<Sizes>,
    path: &Path,
) -> Result<Vec<StoredTensor>, TaskError> {
    let modules = || Ok(outline_of(model, models).map_err(TaskError::bad_input)?.modules);
    pretrained::read_left(path, model, lora.as_ref(), &modules)
}

/// The run's model as its configuration has it.
pub(super) fn outline_of(model: &Model, models: Shelf<Sizes>) -> Result<TextModelOutline, ModelError> {
    let dir = directory::outline(&model.path)?;
    models.text_to_text.of(&dir)?.outline(&dir)
}

fn sums(batch: &PairBatch, rows: &[[f32; 2]]) -> Result<TokenSums, TaskError> {
    let len = batch.shifted.len() / batch.indices.len().max(1);
    TokenSums::from_rows(rows, &batch.targets, batch.step, |row| batch.indices[row as usize / len.max(1)])
}
