//! Steps that every rank has done. What single ranks report is [`coxswain_proto::report`]'s.

use std::{ops::Range, time::Duration};

pub use coxswain_proto::report::{
    CacheUse, MergedMetrics, Metric, PhaseMemory, Skip, SkipCause, StateSource, StepReport, StepTimes,
    Totals, WorkerPhase,
};
use coxswain_proto::{
    ids::{Bytes, Generation, Slot, Step},
    report::highest_learning_rate,
};

/// A step that every rank has done.
#[derive(Clone, Debug, PartialEq)]
pub struct CommittedStep {
    /// Which step.
    pub step: Step,
    /// Steps of the whole run.
    pub total_steps: u64,
    /// What of the data it took.
    pub consumed: DataConsumption,
    /// The membership that did it.
    pub generation: Generation,
    /// Ranks in that membership.
    pub world: u32,
    /// As all ranks reported it.
    pub totals: Totals,
    /// Mean over ranks.
    pub times: StepTimes,
    /// Merged over ranks, as each says.
    pub metrics: Vec<Metric>,
    /// Over all ranks.
    pub tokens: u64,
    /// Largest over ranks.
    pub memory_peak: MemoryPeak,
    /// Times the step was voted down before it was committed.
    pub retries: u32,
    /// The generation of the feature cache that it took its features from; 0 for none.
    pub cache_generation: u64,
    /// What the cache did: samples over all ranks, mean times.
    pub cache: CacheUse,
    /// Ranks whose reports were there when it was committed. Fewer than `world`: the later state of all ranks
    /// proves the rest. 0: that state alone proves it, and its totals are not known.
    pub reports: u32,
    /// Why it was left out, if it was: nothing was learned from its samples, and its totals are 0.
    pub skipped: Option<Skip>,
}

/// The largest memory of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryPeak {
    /// How much.
    pub bytes: Bytes,
    /// Whose.
    pub slot: Slot,
}

/// What of the data a step took, over all ranks.
#[derive(Clone, Debug, PartialEq)]
pub struct DataConsumption {
    /// Which epoch its samples belong to.
    pub epoch: u64,
    /// Positions of the epoch's order.
    pub positions: Range<u64>,
    /// Positions among them that were left out: their samples failed on several workers.
    pub left_out: Vec<Range<u64>>,
}

impl CommittedStep {
    /// Samples over all ranks.
    pub fn samples(&self) -> u64 {
        let DataConsumption { positions, left_out, .. } = &self.consumed;
        let left_out: u64 = left_out.iter().map(|hole| hole.end - hole.start).sum();
        (positions.end - positions.start).saturating_sub(left_out)
    }

    /// The highest learning rate of all parameter groups; nothing if none was reported.
    pub fn learning_rate(&self) -> Option<f64> {
        highest_learning_rate(&self.metrics)
    }

    /// Samples of all ranks in a second.
    pub fn samples_per_second(&self) -> f64 {
        per_second(self.samples() as f64, self.times.total)
    }

    /// Tokens of all ranks in a second.
    pub fn tokens_per_second(&self) -> f64 {
        per_second(self.tokens as f64, self.times.total)
    }
}

fn per_second(count: f64, time: Duration) -> f64 {
    if time.is_zero() { 0.0 } else { count / time.as_secs_f64() }
}
