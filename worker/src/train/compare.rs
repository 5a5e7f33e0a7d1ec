//! A run's memory laid beside its prediction, once it is over.

use super::run::Training;
use crate::{
    kernels::Tape,
    link::Phase,
    memory::prediction::outcome::{Finished, Outcome},
};

/// The phases of a step: their peak is what a prediction is about.
const STEP: [Phase; 5] =
    [Phase::Data, Phase::Forward, Phase::Backward, Phase::Communication, Phase::Optimizer];

impl<B: Tape<Base = B>> Training<'_, B> {
    /// Predicts this rank as it went, compares, and keeps the result for the next prediction on this machine. None when there is
    /// nothing to compare: no step was taken, the micro-batch changed under way, or nobody counts allocations.
    pub(super) fn compare_memory(&mut self) -> Option<Outcome> {
        let peaks = self.meter.report();
        let of_steps = peaks.iter().filter(|peak| STEP.contains(&peak.phase));
        let peak = of_steps.map(|peak| peak.in_use.0).max().filter(|&peak| peak > 0)?;
        if self.micro_batch != self.spec.train.micro_batch || self.sightings.ready == 0 {
            return None;
        }
        let world = u64::from(self.world());
        let samples = (self.spec.train.global_batch as u64).div_ceil(world);
        let zero = self.held.as_ref()?.optimizer.bytes(self.comm.as_ref());
        let finished = Finished {
            spec: self.spec,
            micro_batch: (self.micro_batch as u64).min(samples),
            world,
            rank: u64::from(self.rank().0),
            peak,
            measured: self.sightings.measured(&zero, peak),
        };
        match finished.compare() {
            Ok(outcome) => Some(outcome),
            Err(error) => {
                tracing::warn!(%error, "memory cannot be compared with its prediction");
                None
            }
        }
    }
}
