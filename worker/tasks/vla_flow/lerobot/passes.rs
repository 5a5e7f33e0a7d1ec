//! A micro-batch through the policy: loss and gradients, the loss alone, and sampled actions.
//!
//! Noise is of the policy's padded width, as LeRobot draws it; what counts of it are the data set's
//! dimensions, or all of them (`expert.loss`).

use burn::tensor::{Tensor, TensorData};
use coxswain_models::{
    Shelf,
    pretrained::{adapters::TunedModules, checkpoint::CheckpointDir, prompts::DropoutKeys},
};
use coxswain_nn::{
    kernels::Tape,
    params::{GradientSums, TrainableLayout, Trainables},
};
use coxswain_policies::{
    Draws, KeptFeatures, KeptTokens, NoiseEnd, Policy, PolicyFiles, PolicyObservation, PolicySizes, Training,
};
use coxswain_proto::run_spec::{Recompute, RunSpec};
use coxswain_task::{CachedFeatures, MicroLoss, Pass, StageClock};

use super::parts::drops;
use crate::vla_flow::{
    base::PolicyBase,
    config::{FlowConvention, PolicyLoss, VlaSettings},
    data::{MicroBatch, SampleDims, widened},
    flow::{self, CleanActions, FlowKeys, NoisyActions, SamplingStart},
    policy::{PolicyError, StepError, check_finite, download, failed},
};

/// All of the policy, as its time is shown.
const STAGE: &str = "expert";

/// A policy's, by the time at which actions are noise.
pub fn convention(noise: NoiseEnd) -> FlowConvention {
    match noise {
        NoiseEnd::Zero => FlowConvention::NoiseAtZero,
        NoiseEnd::One => FlowConvention::NoiseAtOne,
    }
}

/// A policy, and what of it trains in a run.
#[derive(Clone, Copy)]
pub struct TunedPolicy<'p> {
    /// The policy's directory.
    pub base: &'p PolicyBase,
    /// What trains.
    pub tuned: &'p TunedModules,
    /// The task's keys.
    pub settings: &'p VlaSettings,
}

/// A policy with what its passes need of a run.
pub struct PolicyPasses<B: Tape<Base = B>> {
    /// The policy.
    pub policy: Box<dyn Policy<B>>,
    /// The id that stands for a token of an image.
    pub image: u32,
    /// `run.seed`.
    pub seed: u64,
    /// `train.recompute`.
    pub recompute: Recompute,
    /// Whether adapters drop anything.
    pub drops: bool,
    /// Values of the data set's actions.
    pub action: usize,
    /// `expert.loss`.
    pub loss: PolicyLoss,
    /// What is kept of samples, if anything is.
    pub kept: KeptTokens,
    /// Values of a token that are kept.
    pub kept_width: usize,
    /// Where it is.
    pub device: B::Device,
}

/// A micro-batch in the policy's widths.
struct PolicyBatch {
    state: Vec<f32>,
    actions: Vec<f32>,
    widths: Vec<usize>,
    /// `[b, chunk]`, which steps count.
    valid: Vec<f32>,
}

impl<B: Tape<Base = B>> PolicyPasses<B> {
    /// Reads the policy in a directory for a run on samples of these sizes; with where in the flat buffer
    /// what trains of it lies, and what that starts from.
    pub fn load(
        spec: &RunSpec,
        TunedPolicy { base, tuned, settings }: TunedPolicy<'_>,
        models: Shelf<B>,
        dims: SampleDims,
        device: &B::Device,
    ) -> Result<(Self, TrainableLayout, Vec<f32>), PolicyError> {
        let dtype = settings.model.weights_dtype;
        let mut layout = TrainableLayout::default();
        let (PolicyBase { directory, backbone, kind, .. }, kept) = (base, base.kept(spec));
        let files = PolicyFiles { directory, backbone, dtype };
        let policy = kind.load(files, tuned, models, &mut layout, device)?;
        let checkpoint = CheckpointDir { path: &directory.dir, rules: kind.rules() };
        let initial = tuned.initial_values::<B>(spec.run.seed, &layout, checkpoint, dtype)?;
        let passes = Self {
            policy,
            image: base.outline.image_token,
            seed: spec.run.seed,
            recompute: spec.train.recompute,
            drops: drops(settings),
            action: dims.action,
            loss: settings.expert.loss,
            kept,
            kept_width: kept.width(&base.outline),
            device: device.clone(),
        };
        Ok((passes, layout, initial))
    }

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
        let (velocity, backward) = self
            .policy
            .forward_kept(trainables, self.training(batch), self.observed(batch, &padded), draws)
            .map_err(|error| failed(batch, error))?;
        let clean = self.clean(batch, &padded, self.counted_widths(batch, &padded));
        let loss = flow::squared_error(&download(velocity), &noised.target, clean);
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
        backward(dv_nc, grads);
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
            .sampler(trainables, self.observed(batch, &padded))
            .map_err(|error| failed(batch, error))?;
        let draws = Draws { times: &noised.times, noisy: &noised.noisy };
        let clean = self.clean(batch, &padded, self.counted_widths(batch, &padded));
        let loss = flow::squared_error(&download(velocity(draws)), &noised.target, clean);
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
        let chunk = self.policy.sizes().chunk * self.width();
        let start = flow::starting_noise(seed, &batch.sample_indices, chunk);
        let sampled = self.sample_from(trainables, batch, start.into())?;
        Ok(sampled.chunks(self.width()).flat_map(|step| step[..self.action].to_vec()).collect())
    }

    /// Samples normalised action chunks of the policy's padded width from noise of that width, both `[b,
    /// chunk, padded]`.
    pub fn sample_from(
        &self,
        trainables: &Trainables<B>,
        batch: &MicroBatch,
        start: SamplingStart,
    ) -> Result<Vec<f32>, StepError> {
        if batch.is_empty() {
            return Ok(Vec::new());
        }
        let padded = self.padded(batch);
        let velocity = self
            .policy
            .sampler(trainables, self.observed(batch, &padded))
            .map_err(|error| failed(batch, error))?;
        Ok(flow::sample(self.convention(), self.policy.sizes().steps, start, |x, t| {
            download(velocity(Draws { times: &vec![t; batch.len()], noisy: x }))
        }))
    }

    fn convention(&self) -> FlowConvention {
        convention(self.policy.sizes().noise)
    }

    fn width(&self) -> usize {
        self.policy.sizes().padded[1]
    }

    fn padded(&self, batch: &MicroBatch) -> PolicyBatch {
        let PolicySizes { padded: [state, action], counts_padding, blanks_padding, .. } = self.policy.sizes();
        let mut actions = widened(&batch.actions, batch.action_valid.len(), action);
        if blanks_padding {
            let steps = actions.chunks_mut(action).zip(&batch.action_valid);
            steps.filter(|(_, valid)| **valid == 0.0).for_each(|(step, _)| step.fill(0.0));
        }
        let valid = match counts_padding {
            true => vec![1.0; batch.action_valid.len()],
            false => batch.action_valid.clone(),
        };
        PolicyBatch {
            valid,
            state: widened(&batch.state, batch.len(), state),
            actions,
            widths: vec![action; batch.len()],
        }
    }

    /// How many dimensions of an action the loss counts, for each row.
    fn counted_widths<'b>(&self, batch: &'b MicroBatch, padded: &'b PolicyBatch) -> &'b [usize] {
        match self.loss {
            PolicyLoss::Lerobot => &batch.action_widths,
            PolicyLoss::Openpi => &padded.widths,
        }
    }

    fn observed<'b>(&self, batch: &'b MicroBatch, padded: &'b PolicyBatch) -> PolicyObservation<'b> {
        let features = batch.features.as_ref();
        let features = features.map(|features| KeptFeatures { of: self.kept, values: &features.values });
        PolicyObservation { prompts: batch.prompts(), image: self.image, state: &padded.state, features }
    }

    fn training<'b>(&self, batch: &'b MicroBatch) -> Training<'b> {
        let keys = DropoutKeys {
            seed: self.seed,
            step: batch.step.0,
            samples: &batch.sample_indices,
            images_per_row: &batch.images_per_row,
        };
        let drops = self.drops || self.policy.sizes().drops;
        Training { recompute: self.recompute, dropout: drops.then_some(keys) }
    }

    /// What is to be kept of a micro-batch.
    pub fn features(
        &self,
        trainables: &Trainables<B>,
        batch: &MicroBatch,
    ) -> Result<CachedFeatures, StepError> {
        let width = self.kept_width;
        if batch.is_empty() {
            return Ok(CachedFeatures { width, values: Vec::new() });
        }
        let features = self
            .policy
            .features(trainables, self.observed(batch, &self.padded(batch)), self.kept)
            .map_err(|error| failed(batch, error))?;
        Ok(CachedFeatures { width, values: download(features) })
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
            valid: &padded.valid,
            action: self.width(),
            widths,
        }
    }

    fn noised(&self, batch: &MicroBatch, padded: &PolicyBatch) -> NoisyActions {
        let keys = FlowKeys { seed: self.seed, step: batch.step.0, repeats: 1 };
        flow::noise(self.convention(), keys, self.clean(batch, padded, &padded.widths))
    }
}
