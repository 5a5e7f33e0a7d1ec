//! The model of a run: read, adapted, run forward and backward, writing.

use std::path::Path;

use coxswain_models::{
    qwen2_5_vl::{
        adapters::{Adapters, HeadAdapter, Tuned},
        error::ModelError,
    },
    t5::{
        Predicted, T5, T5Config,
        context::T5Context,
        modules::modules,
        pass::T5Run,
        writing::{Choice, NoToken},
    },
};
use coxswain_nn::{
    kernels::Tape,
    lora::{LoraPlan, TrainedModules},
    params::{GradientSums, TrainableLayout, Trainables},
    recompute::Retention,
};
use coxswain_proto::{
    config::SettingsError,
    ids::Step,
    run_spec::{Recompute, RunSpec},
};
use coxswain_task::{MicroLoss, Pass, StageClock};

use super::{config::Seq2SeqSettings, data::PairBatch};

/// Head and loss, as their time is shown.
pub(super) const HEAD_STAGE: &str = "head";

/// A model that cannot be built.
#[derive(Debug, thiserror::Error)]
pub enum PairLoadError {
    /// The checkpoint, or adapter settings that do not fit it.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The run's settings are none of this task's.
    #[error(transparent)]
    Task(#[from] SettingsError),
}

/// A micro-batch whose loss is infinite or not a number.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("step {step}: the loss of pairs {pairs:?} is not finite; lower the learning rate")]
pub struct NonFiniteLoss {
    /// Optimizer step.
    pub step: Step,
    /// The pairs concerned.
    pub pairs: Vec<u64>,
}

/// What the targets of a batch have come to.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TargetSums {
    /// Sum of the losses of tokens, in nats.
    pub loss_sum: f64,
    /// Tokens that are the likeliest at their place.
    pub right: f64,
    /// Tokens.
    pub tokens: f64,
}

/// The model with what trains of it.
pub struct PairModel<B: Tape<Base = B>> {
    model: T5<B>,
    lora: Option<LoraPlan>,
    full: TrainedModules,
    retention: Retention,
}

impl<B: Tape<Base = B>> PairModel<B> {
    /// Reads the model directory. Returns the model with the layout of everything that trains and the values
    /// it starts from; both are the same on every rank.
    pub fn load(
        spec: &RunSpec,
        device: &B::Device,
    ) -> Result<(Self, TrainableLayout, Vec<f32>), PairLoadError> {
        let settings = Seq2SeqSettings::of(spec)?;
        let tuned = tuned(&settings)?;
        let mut layout = TrainableLayout::default();
        let (dir, dtype) = (Path::new(&settings.model.path), settings.model.weights_dtype);
        let model = T5::load(dir, dtype, tuned.trains(), &mut layout, device)?;
        let values = tuned.initial_values::<B>(spec.run.seed, &layout, dir, dtype)?;
        let retention =
            Retention { recompute: spec.train.recompute, activations: settings.model.activations_dtype };
        let Tuned { adapters, full } = tuned;
        let lora = adapters.map(|Adapters { plan, .. }| plan);
        Ok((Self { model, lora, full, retention }, layout, values))
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
    ) -> Result<MicroLoss, NonFiniteLoss> {
        if batch.targets.rows.is_empty() {
            return Ok(MicroLoss::default());
        }
        clock.enter(Pass::Forward);
        let texts = batch.texts();
        let context = T5Context::new(&self.model, &texts);
        let run = T5Run { model: &self.model, context: &context, trainables, retention: self.retention };
        let (hidden_nd, trace) = run.forward(&texts, &mut |stage| clock.lap(stage));
        let Predicted { rows, dhidden_nd } = self.model.predict(hidden_nd, &batch.targets, Some(&mut *grads));
        let found = sums(batch, &rows)?;
        clock.lap(HEAD_STAGE);

        clock.enter(Pass::Backward);
        if let Some(dhidden_nd) = dhidden_nd {
            run.backward(trace, dhidden_nd, grads, &mut |stage| clock.lap(stage));
        }
        Ok(MicroLoss { loss_sum: found.loss_sum, valid: found.tokens })
    }

    /// Losses of a batch without a trace.
    pub fn losses(&self, trainables: &Trainables<B>, batch: &PairBatch) -> Result<TargetSums, NonFiniteLoss> {
        if batch.targets.rows.is_empty() {
            return Ok(TargetSums::default());
        }
        let texts = batch.texts();
        let context = T5Context::new(&self.model, &texts);
        // Nothing is kept for a backward pass, and every value is the one that a training pass computes.
        let retention = Retention { recompute: Recompute::None, ..self.retention };
        let run = T5Run { model: &self.model, context: &context, trainables, retention };
        let hidden_nd = run.decode(run.encode(texts.source), texts.target);
        sums(batch, &self.model.predict(hidden_nd, &batch.targets, None).rows)
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
}

/// What trains of the model, by a run's settings.
pub(super) fn tuned(settings: &Seq2SeqSettings) -> Result<Tuned, ModelError> {
    let modules = modules(&T5Config::read(Path::new(&settings.model.path))?);
    let head = HeadAdapter::Refused("which takes none in this task");
    Tuned::resolve(settings.lora.as_ref(), &settings.model.train, &modules, head)
}

fn sums(batch: &PairBatch, rows: &[[f32; 2]]) -> Result<TargetSums, NonFiniteLoss> {
    let mut sums = TargetSums { tokens: rows.len() as f64, ..TargetSums::default() };
    for [loss, margin] in rows {
        sums.loss_sum += f64::from(*loss);
        sums.right += f64::from(u8::from(*margin >= 0.0));
    }
    if sums.loss_sum.is_finite() {
        return Ok(sums);
    }
    let len = batch.shifted.len() / batch.indices.len().max(1);
    let broken = batch.targets.rows.iter().zip(rows).filter(|(_, row)| !row[0].is_finite());
    let mut pairs: Vec<u64> = broken.map(|(at, _)| batch.indices[*at as usize / len.max(1)]).collect();
    pairs.dedup();
    Err(NonFiniteLoss { step: batch.step, pairs })
}
