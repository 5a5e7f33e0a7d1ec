//! A policy that answers.

use std::{path::Path, sync::Arc};

use coxswain_models::Shelves;
use coxswain_nn::{kernels::Tape, params::Trainables};
use coxswain_proto::{ids::Step, run_spec::RunSpec};
use coxswain_task::{Fault, Named, RequestReader, Responder, Sample as AnySample, TaskError};

use super::{
    observation::{ACTIONS, ObservationReader},
    observed::Observed,
    weights,
};
use crate::vla_flow::{
    config::VlaSettings,
    data::{Sample, collate},
    policy::Policy,
};

/// A trained policy on a device.
pub struct PolicyResponder<B: Tape<Base = B>> {
    policy: Policy<B>,
    trainables: Trainables<B>,
    reader: Arc<ObservationReader>,
}

impl<B: Tape<Base = B>> PolicyResponder<B> {
    /// Loads the pretrained model, and what a run has left in `dir`.
    pub fn open(
        spec: &RunSpec,
        models: Shelves<B>,
        dir: &Path,
        device: &B::Device,
    ) -> Result<Self, TaskError> {
        let settings = VlaSettings::of(spec).map_err(TaskError::bad_input)?;
        let reader =
            ObservationReader::open(spec, models.sizes, &settings, dir).map_err(TaskError::bad_input)?;
        let spec = weights::with_adapter_of(spec, models.sizes, settings, dir)?;
        let (policy, layout, mut values) =
            Policy::<B>::load(&spec, models.device, reader.dims(), device).map_err(TaskError::bad_input)?;
        weights::fill(dir, &layout, &mut values)?;
        Ok(Self { policy, trainables: Trainables::new(layout, values, device), reader: Arc::new(reader) })
    }
}

impl<B: Tape<Base = B>> Responder for PolicyResponder<B> {
    fn reader(&self) -> Arc<dyn RequestReader> {
        self.reader.clone()
    }

    fn answer(&self, requests: &[Box<dyn AnySample>]) -> Result<Vec<Named>, TaskError> {
        let observed: Vec<&Observed> = requests.iter().map(|request| request.content()).collect();
        let samples: Vec<&Sample> = observed.iter().map(|observed| &observed.sample).collect();
        let mut batch = collate(Step(0), &samples, self.reader.pad_token());
        // Where training has the recorded actions, a request has its noise.
        let noise = std::mem::take(&mut batch.actions);
        let sampled = self.policy.sample_actions_from(&self.trainables, &batch, noise)?;
        if sampled.iter().any(|value| !value.is_finite()) {
            return Err(TaskError::new(Fault::Numeric, "the policy's actions are not finite"));
        }
        let chunk = sampled.len() / samples.len().max(1);
        let answer = |(chunk, observed): (&[f32], &&Observed)| {
            [(ACTIONS.to_owned(), self.reader.actions(chunk, &observed.offset))].into()
        };
        Ok(sampled.chunks_exact(chunk.max(1)).zip(&observed).map(answer).collect())
    }
}
