//! A run's memory laid beside its prediction: for the tables while it goes, and for `summary.json` and later
//! predictions at its end.

use coxswain_nn::kernels::Tape;

use crate::train::{TrainError, Workbench};
use crate::{
    collective::Computes,
    link::{Phase, PhaseMemory, Report},
    memory::prediction::outcome::{MeasuredRun, Outcome},
};

/// The phases of a step: their peak is what a prediction is about.
const STEP: [Phase; 5] =
    [Phase::Data, Phase::Forward, Phase::Backward, Phase::Communication, Phase::Optimizer];

impl<B: Tape<Base = B>> Workbench<'_, B> {
    /// Says what this rank's memory has come to: these peaks by phase, and the whole run beside its
    /// prediction.
    pub(in crate::train) fn report_memory(&mut self, peaks: Vec<PhaseMemory>) -> Result<(), TrainError> {
        let comparison = self.beside_prediction(None, |finished| finished.compare());
        Ok(self.members.link.report(Report::Memory(peaks, comparison.as_ref().map(Into::into)))?)
    }

    /// The comparison of a run that is over, kept for the next prediction on this machine.
    pub(in crate::train) fn conclude_memory(&mut self, seconds_a_step: Option<f64>) -> Option<Outcome> {
        self.beside_prediction(seconds_a_step, |finished| finished.conclude())
    }

    /// None when there is nothing to compare: no step was taken, the micro-batch changed under way, nobody
    /// counts allocations, or what was predicted is on a GPU, whose allocator does not tell its peaks.
    fn beside_prediction(
        &mut self,
        seconds_a_step: Option<f64>,
        compare: impl FnOnce(&MeasuredRun<'_>) -> Outcome,
    ) -> Option<Outcome> {
        let peaks = self.stats.meter.report();
        let of_steps = peaks.iter().filter(|peak| STEP.contains(&peak.phase));
        let peak = of_steps.map(|peak| peak.in_use.0).max().filter(|&peak| peak > 0)?;
        let changed = self.feed.micro_batch != self.run.spec.train.micro_batch;
        let took = self.stats.meter.most_took();
        if changed || took == 0 || self.members.computes == Computes::OnGpu {
            return None;
        }
        let world = u64::from(self.members.world());
        let samples = (self.run.spec.train.global_batch as u64).div_ceil(world);
        let zero = self.learner.held.as_ref()?.optimizer.bytes(self.members.comm.as_ref());
        self.stats.snapshots.streamed = self.learner.objective.most_streamed();
        let cache = self.features.as_ref().map_or(0, |features| features.bytes().0);
        let subject = self.run.task.sizes(&self.run.computed());
        let subject = subject
            .inspect_err(|error| tracing::warn!(%error, "memory cannot be compared with its prediction"))
            .ok()?;
        let finished = MeasuredRun {
            subject: &*subject,
            micro_batch: (self.feed.micro_batch as u64).min(samples),
            world,
            rank: u64::from(self.members.rank().0),
            peak,
            measured: self.stats.snapshots.measured(&zero, cache, took),
            seconds_a_step,
            records: self.run.records.as_deref(),
        };
        Some(compare(&finished))
    }
}
