//! A policy that answers.

use std::{path::Path, sync::Arc};

use coxswain_models::Shelves;
use coxswain_nn::{kernels::Tape, params::Trainables};
use coxswain_proto::{ids::Step, run_spec::RunSpec};
use coxswain_task::{Fault, NamedValues, RequestReader, Responder, Sample as AnySample, TaskError};

use super::{
    described::PolicyDescription,
    observation::{ACTIONS, ObservationReader},
    observed::ObservedSample,
    weights,
};
use crate::vla_flow::{
    config::VlaSettings,
    data::{MicroBatch, Sample, collate},
    flow::SamplingStart,
    lerobot::{PolicyPasses, TunedPolicy},
    policy::{Policy, StepError},
};

/// A policy with what it has learned, of whichever kind.
trait ChunkSampler {
    /// Chunks of actions as the model gives them.
    fn sample(&self, batch: &MicroBatch, start: SamplingStart) -> Result<Vec<f32>, StepError>;
}

impl<B: Tape<Base = B>> ChunkSampler for (Policy<B>, Trainables<B>) {
    fn sample(&self, batch: &MicroBatch, start: SamplingStart) -> Result<Vec<f32>, StepError> {
        self.0.sample_actions_from(&self.1, batch, start)
    }
}

impl<B: Tape<Base = B>> ChunkSampler for (PolicyPasses<B>, Trainables<B>) {
    fn sample(&self, batch: &MicroBatch, start: SamplingStart) -> Result<Vec<f32>, StepError> {
        self.0.sample_from(&self.1, batch, start)
    }
}

/// A trained policy on a device.
pub struct PolicyResponder {
    sampler: Box<dyn ChunkSampler>,
    reader: Arc<ObservationReader>,
}

impl PolicyResponder {
    /// Loads the pretrained model, and what a run has left in `dir`.
    pub fn load<B: Tape<Base = B>>(
        spec: &RunSpec,
        models: Shelves<B>,
        dir: &Path,
        device: &B::Device,
    ) -> Result<Self, TaskError> {
        let mut settings = VlaSettings::from_spec(spec).map_err(TaskError::bad_input)?;
        let mut described =
            PolicyDescription::from_dir(spec, models.sizes, &settings, dir).map_err(TaskError::bad_input)?;
        let base = described.base.take();
        let reader = ObservationReader::new(spec, models.sizes, described).map_err(TaskError::bad_input)?;
        let sampler: Box<dyn ChunkSampler> = match base {
            Some(base) => {
                // Adapters are merged in what a run has left: nothing of the run's settings is laid over it,
                // and few bits would round them away.
                settings.model.weights_dtype = settings.model.weights_dtype.dense().into();
                let tuned = base.as_published().map_err(TaskError::bad_input)?;
                let policy = TunedPolicy { base: &base, tuned: &tuned, settings: &settings };
                let passes = PolicyPasses::load(spec, policy, models.device, reader.dims(), device);
                let (passes, layout, values) = passes.map_err(TaskError::bad_input)?;
                Box::new((passes, Trainables::new(layout, values, device)))
            }
            None => {
                let spec = weights::with_adapter_of(spec, models.sizes, settings, dir)?;
                let loaded = Policy::<B>::load(&spec, models.device, reader.dims(), device);
                let (policy, layout, mut values) = loaded.map_err(TaskError::bad_input)?;
                weights::fill(dir, &layout, &mut values)?;
                Box::new((policy, Trainables::new(layout, values, device)))
            }
        };
        Ok(Self { sampler, reader: Arc::new(reader) })
    }
}

impl Responder for PolicyResponder {
    fn reader(&self) -> Arc<dyn RequestReader> {
        self.reader.clone()
    }

    fn answer(&self, requests: &[Box<dyn AnySample>]) -> Result<Vec<NamedValues>, TaskError> {
        let observed: Vec<&ObservedSample> = requests.iter().map(|request| request.content()).collect();
        let samples: Vec<&Sample> = observed.iter().map(|observed| &observed.sample).collect();
        let mut batch = collate(Step(0), &samples, self.reader.pad_token());
        // Where training has the recorded actions, a request has what sampling starts from.
        let values = std::mem::take(&mut batch.actions);
        let strengths = observed.iter().flat_map(|observed| &observed.strengths).copied().collect();
        let sampled = self.sampler.sample(&batch, SamplingStart { values, strengths })?;
        if sampled.iter().any(|value| !value.is_finite()) {
            return Err(TaskError::new(Fault::Numeric, "the policy's actions are not finite"));
        }
        let chunk = sampled.len() / samples.len().max(1);
        let answer = |(chunk, observed): (&[f32], &&ObservedSample)| {
            [(ACTIONS.to_owned(), self.reader.actions(chunk, &observed.offset))].into()
        };
        Ok(sampled.chunks_exact(chunk.max(1)).zip(&observed).map(answer).collect())
    }
}
