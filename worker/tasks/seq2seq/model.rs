//! The model of a run: read, adapted, run forward and backward, writing.

use std::path::Path;

use coxswain_models::{
    directory,
    qwen2_5_vl::{
        adapters::{Adapters, HeadAdapter, Tuned},
        error::ModelError,
        settings::Model,
    },
    t5::{
        T5, T5Config,
        context::{T5Context, TextRows},
        modules::modules,
        pass::T5Run,
        writing::{Choice, NoToken},
    },
};
use coxswain_nn::{
    files::StoredTensor,
    kernels::Tape,
    lora::{LoraPlan, Module, TrainedModules},
    next_token::NextTokens,
    params::{GradientSums, TrainableLayout, Trainables},
    recompute::Retention,
};
use coxswain_proto::run_spec::{Recompute, RunSpec};
use coxswain_task::{MicroLoss, Pass, StageClock, TaskError};

use super::{config::Seq2SeqSettings, data::PairBatch};
use crate::{
    pretrained::{self, Tuning},
    tokens::{memory::HEAD_STAGE, sums::TokenSums},
};

/// The model with what trains of it.
pub struct PairModel<B: Tape<Base = B>> {
    model: T5<B>,
    lora: Option<LoraPlan>,
    full: TrainedModules,
    retention: Retention,
    seed: u64,
}

impl<B: Tape<Base = B>> PairModel<B> {
    /// Reads the model directory. Returns the model with the layout of everything that trains and the values
    /// it starts from; both are the same on every rank.
    pub fn load(spec: &RunSpec, device: &B::Device) -> Result<(Self, TrainableLayout, Vec<f32>), TaskError> {
        let settings = Seq2SeqSettings::of(spec).map_err(TaskError::bad_input)?;
        let tuned = tuned(&settings).map_err(TaskError::bad_input)?;
        let mut layout = TrainableLayout::default();
        let dir = &pretrained::directory::<B>(&settings.model.path).map_err(TaskError::bad_input)?;
        let dtype = settings.model.weights_dtype;
        let model = T5::load(dir, dtype, tuned.trains(), &mut layout, device);
        let model = model.map_err(TaskError::bad_input)?;
        let values = tuned.initial_values::<B>(spec.run.seed, &layout, dir, dtype);
        let values = values.map_err(TaskError::bad_input)?;
        let retention =
            Retention { recompute: spec.train.recompute, activations: settings.model.activations_dtype };
        let Tuned { adapters, full } = tuned;
        let lora = adapters.map(|Adapters { plan, .. }| plan);
        Ok((Self { model, lora, full, retention, seed: spec.run.seed }, layout, values))
    }

    /// Its adapters, if it has any.
    pub fn lora(&self) -> Option<&LoraPlan> {
        self.lora.as_ref()
    }

    /// What of it trains in full.
    pub fn full(&self) -> &TrainedModules {
        &self.full
    }

    /// Sizes of the model.
    pub fn config(&self) -> &T5Config {
        &self.model.config
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
        let texts = batch.texts();
        let context = T5Context::of_training(&self.model, trainables, &texts).dropping(self.dropped(batch));
        let run = T5Run { model: &self.model, context: &context, trainables, retention: self.retention };
        let (hidden_nd, trace) = run.forward(&texts, &mut |stage| clock.lap(stage));
        let NextTokens { rows, dhidden, .. } =
            self.model.predict(trainables, hidden_nd, &batch.targets, Some(&mut *grads));
        let loss = sums(batch, &rows)?.loss();
        clock.lap(HEAD_STAGE);

        clock.enter(Pass::Backward);
        if let Some(dhidden_nd) = dhidden {
            run.backward(trace, dhidden_nd, grads, &mut |stage| clock.lap(stage));
        }
        Ok(loss)
    }

    /// Losses of a batch without a trace.
    pub fn losses(&self, trainables: &Trainables<B>, batch: &PairBatch) -> Result<TokenSums, TaskError> {
        if batch.targets.rows.is_empty() {
            return Ok(TokenSums::default());
        }
        let texts = batch.texts();
        let context = T5Context::new(&self.model, trainables, &texts);
        // Nothing is kept for a backward pass, and every value is the one that a training pass computes.
        let retention = Retention { recompute: Recompute::None, ..self.retention };
        let run = T5Run { model: &self.model, context: &context, trainables, retention };
        let hidden_nd = run.decode(run.encode(texts.source), texts.target);
        sums(batch, &self.model.predict(trainables, hidden_nd, &batch.targets, None).rows)
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

    /// The tokens that the adapters of a training pass drop from; none where they drop nothing.
    fn dropped(&self, batch: &PairBatch) -> Option<TextRows<B>> {
        let drops = self.lora.as_ref().is_some_and(|plan| plan.recipe().dropout > 0.0);
        let PairBatch { step, indices, .. } = batch;
        drops.then(|| TextRows::of(&batch.texts(), self.seed, step.0, indices, &self.model.device))
    }
}

/// What trains of the model, by a run's settings.
pub(super) fn tuned(settings: &Seq2SeqSettings) -> Result<Tuned, ModelError> {
    let modules = modules_of(&settings.model)?;
    let head = HeadAdapter::InFull("which takes none in this task");
    Tuned::resolve(settings.lora.as_ref(), &settings.model.train, &modules, head)
}

/// What a run of this task has left at `path`, under the names that this run's layout has.
pub(super) fn read_left(spec: &RunSpec, path: &Path) -> Result<Vec<StoredTensor>, TaskError> {
    let Seq2SeqSettings { model, lora, .. } = Seq2SeqSettings::of(spec).map_err(TaskError::bad_input)?;
    let modules = || modules_of(&model).map_err(TaskError::bad_input);
    let here = Tuning {
        modules: &modules,
        lora: &|_| Ok(lora.clone()),
        train: &model.train,
        weights: model.weights_dtype,
    };
    pretrained::read(path, &[pretrained::BASE.path], &here)
}

fn modules_of(model: &Model) -> Result<Vec<Module>, ModelError> {
    Ok(modules(&T5Config::read(&directory::outline(&model.path)?)?))
}

fn sums(batch: &PairBatch, rows: &[[f32; 2]]) -> Result<TokenSums, TaskError> {
    let len = batch.shifted.len() / batch.indices.len().max(1);
    TokenSums::of(rows, &batch.targets, batch.step, |row| batch.indices[row as usize / len.max(1)])
}
