//! A micro-batch through the policy: loss and gradients, the loss alone, and sampled actions.
//!
//! Noise is of the policy's padded width, as LeRobot draws it; what counts of it are the data set's
//! dimensions.

use burn::tensor::{Tensor, TensorData};
use coxswain_models::vision_language::Broken;
use coxswain_nn::{
    kernels::Tape,
    params::{GradientSums, Trainables},
};
use coxswain_policies::smolvla::{Draws, Observed, SmolVla};
use coxswain_proto::run_spec::Recompute;
use coxswain_task::{MicroLoss, Pass, StageClock};

use crate::vla_flow::{
    config::FlowConvention,
    data::{MicroBatch, widened},
    flow::{self, CleanActions, FlowKeys, NoisyActions},
    policy::{StepError, failed},
};

/// All of the policy, as its time is shown.
const STAGE: &str = "expert";
/// LeRobot's.
const CONVENTION: FlowConvention = FlowConvention::NoiseAtOne;

/// A policy with what its passes need of a run.
pub struct PolicyPasses<B: Tape<Base = B>> {
    /// The policy.
    pub policy: SmolVla<B>,
    /// The id that stands for a token of an image.
    pub image: u32,
    /// `run.seed`.
    pub seed: u64,
    /// `train.recompute`.
    pub recompute: Recompute,
    /// Values of the data set's actions.
    pub action: usize,
    /// Where it is.
    pub device: B::Device,
}

/// A micro-batch in the policy's widths.
struct PolicyBatch {
    state: Vec<f32>,
    actions: Vec<f32>,
    widths: Vec<usize>,
}

impl<B: Tape<Base = B>> PolicyPasses<B> {
    /// Runs one micro-batch and adds the gradient of its loss *sum* to `grads`.
    pub fn forward_backward(
        &self,
        trainables: &Trainables<B>,
        batch: &MicroBatch,
        grads: &mut dyn GradientSums<B>,
        clock: &mut StageClock<'_>,
    ) -> Result<MicroLoss, StepError> {
        if batch.is_empty() {
            return Ok(MicroLoss::default());
        }
        clock.enter(Pass::Forward);
        let padded = self.padded(batch);
        let noised = self.noised(batch, &padded);
        let draws = Draws { times: &noised.times, noisy: &noised.noisy };
        let (velocity, trace) = self
            .policy
            .forward(trainables, self.recompute, self.observed(batch, &padded), draws)
            .map_err(|error| failed(batch, Broken::from(error)))?;
        let clean = self.clean(batch, &padded, &batch.action_widths);
        let loss = flow::squared_error(&values(velocity), &noised.target, clean);
        check_finite(batch, &loss.per_sample)?;
        clock.lap(STAGE);
        clock.enter(Pass::Backward);
        let width = self.width();
        let shape = [loss.gradient.len() / width, width];
        let mut dv_nc = match B::VALUES {
            true => Tensor::from_data(TensorData::new(loss.gradient.clone(), shape), &self.device),
            false => Tensor::zeros(shape, &self.device),
        };
        if let Some(scale) = grads.scaled(clean.valid_count()) {
            dv_nc = dv_nc * scale;
        }
        self.policy.backward(trainables, trace, dv_nc, grads);
        clock.lap(STAGE);
        Ok(MicroLoss { loss_sum: loss.sum(), valid: clean.valid_count() })
    }

    /// The loss that [`PolicyPasses::forward_backward`] would have, from the same draws.
    pub fn loss(&self, trainables: &Trainables<B>, batch: &MicroBatch) -> Result<MicroLoss, StepError> {
        if batch.is_empty() {
            return Ok(MicroLoss::default());
        }
        let padded = self.padded(batch);
        let noised = self.noised(batch, &padded);
        let velocity = self
            .policy
            .velocity(trainables, self.observed(batch, &padded))
            .map_err(|error| failed(batch, Broken::from(error)))?;
        let draws = Draws { times: &noised.times, noisy: &noised.noisy };
        let clean = self.clean(batch, &padded, &batch.action_widths);
        let loss = flow::squared_error(&values(velocity(draws)), &noised.target, clean);
        check_finite(batch, &loss.per_sample)?;
        Ok(MicroLoss { loss_sum: loss.sum(), valid: clean.valid_count() })
    }

    /// Samples normalised action chunks of the data set's width, `[b, horizon, action]`, from noise keyed
    /// by (seed, sample).
    pub fn sample(
        &self,
        trainables: &Trainables<B>,
        batch: &MicroBatch,
        seed: u64,
    ) -> Result<Vec<f32>, StepError> {
        if batch.is_empty() {
            return Ok(Vec::new());
        }
        let padded = self.padded(batch);
        let velocity = self
            .policy
            .velocity(trainables, self.observed(batch, &padded))
            .map_err(|error| failed(batch, Broken::from(error)))?;
        let config = &self.policy.config;
        let start = flow::starting_noise(seed, &batch.sample_indices, config.chunk * self.width());
        let sampled = flow::sample(CONVENTION, config.steps, start, |x, t| {
            values(velocity(Draws { times: &vec![t; batch.len()], noisy: x }))
        });
        Ok(sampled.chunks(self.width()).flat_map(|step| step[..self.action].to_vec()).collect())
    }

    fn width(&self) -> usize {
        self.policy.config.padded[1]
    }

    fn padded(&self, batch: &MicroBatch) -> PolicyBatch {
        let [state, action] = self.policy.config.padded;
        PolicyBatch {
            state: widened(&batch.state, batch.len(), state),
            actions: widened(&batch.actions, batch.action_valid.len(), action),
            widths: vec![action; batch.len()],
        }
    }

    fn observed<'b>(&self, batch: &'b MicroBatch, padded: &'b PolicyBatch) -> Observed<'b> {
        Observed { prompts: batch.prompts(), image: self.image, state: &padded.state }
    }

    fn clean<'b>(
        &self,
        batch: &'b MicroBatch,
        padded: &'b PolicyBatch,
        widths: &'b [usize],
    ) -> CleanActions<'b> {
        CleanActions {
            samples: &batch.sample_indices,
            actions: &padded.actions,
            valid: &batch.action_valid,
            action: self.width(),
            widths,
        }
    }

    fn noised(&self, batch: &MicroBatch, padded: &PolicyBatch) -> NoisyActions {
        let keys = FlowKeys { seed: self.seed, step: batch.step.0, repeats: 1 };
        flow::noise(CONVENTION, keys, self.clean(batch, padded, &padded.widths))
    }
}

fn values<B: Tape<Base = B>>(x: Tensor<B, 2>) -> Vec<f32> {
    if !B::VALUES {
        return vec![0.0; x.shape().num_elements()];
    }
    x.into_data().convert::<f32>().into_vec().expect("converted to f32")
}

fn check_finite(batch: &MicroBatch, per_sample: &[f64]) -> Result<(), StepError> {
    let losses = batch.sample_indices.iter().zip(per_sample);
    let samples: Vec<u64> = losses.filter(|(_, loss)| !loss.is_finite()).map(|(&sample, _)| sample).collect();
    match samples.is_empty() {
        true => Ok(()),
        false => Err(StepError::NonFiniteLoss { step: batch.step, samples }),
    }
}
