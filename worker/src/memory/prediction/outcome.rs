//! A run's memory beside its prediction: while it goes, and at its end, when it is kept for the next
//! prediction.
//!
//! Categories cannot be told apart by an allocator. Some are known to the byte ([`ZeroBytes`]); the others
//! are differences between [`MemorySnapshots`] at moments when one thing has just been made.

use std::{fmt, path::Path};

use coxswain_proto::{
    human,
    memory::{Category, Comparison, MemoryRow, relative},
};
use serde::{Deserialize, Serialize};

use coxswain_task::memory::{Ask, Place, Subject};

use super::{
    fit,
    recorded::{Calibration, Record, RecordedRuns},
};
use crate::zero::ZeroBytes;

/// Bytes in use at moments of a worker's life.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemorySnapshots {
    /// The data set is open, the model is not.
    pub opened: u64,
    /// The model is loaded, and the initial values of everything that trains are filled in.
    pub loaded: u64,
    /// Most bytes of frozen weights at once that are brought when they run, and are there during passes only.
    pub streamed: u64,
    /// This rank's part of frozen weights that are shared out, taken when the ranks were known.
    pub parts: u64,
}

impl MemorySnapshots {
    /// Bytes by category, for a run whose micro-batches took `took` at most, beyond what was there before
    /// them. Input and framework cannot be told apart and are left out. `cache` is what is held for kept
    /// features.
    pub fn measured(&self, zero: &ZeroBytes, cache: u64, took: u64) -> Vec<(Category, u64)> {
        let ZeroBytes { weights, state, grads, comm_buffers, redundancy, .. } = *zero;
        vec![
            (
                Category::FrozenWeights,
                self.loaded.saturating_sub(self.opened + weights.0) + self.parts + self.streamed,
            ),
            (Category::Trainables, weights.0),
            (Category::Gradients, grads.0),
            (Category::OptimizerShard, state.0),
            (Category::Replica, redundancy.0),
            (Category::CollectiveBuffers, comm_buffers.0),
            (Category::Activations, took.saturating_sub(self.streamed)),
            (Category::Cache, cache),
        ]
    }
}

/// What a run has measured on one rank so far.
pub struct MeasuredRun<'a> {
    /// The run's sizes.
    pub subject: &'a dyn Subject,
    /// The micro-batch of its largest peak.
    pub micro_batch: u64,
    /// Ranks.
    pub world: u64,
    /// This one.
    pub rank: u64,
    /// Largest peak in forward, backward and optimizer.
    pub peak: u64,
    /// By category.
    pub measured: Vec<(Category, u64)>,
    /// How long its steps took, without what only the first ones take; none where none were counted.
    pub seconds_a_step: Option<f64>,
    /// Where earlier runs of this machine are on record, and this one is put; none: it learns nothing and
    /// leaves nothing.
    pub records: Option<&'a Path>,
}

/// A run's memory, predicted and measured: part of `summary.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    /// Predicted peak, corrected by the calibration there was.
    pub predicted: u64,
    /// Measured peak.
    pub measured: u64,
    /// Signed, relative to what was measured.
    pub error: f64,
    /// The calibration that the prediction rested on; none: sizes alone.
    pub calibration: Option<Calibration>,
    /// By category, without calibration.
    pub categories: Vec<MemoryRow>,
}

impl MeasuredRun<'_> {
    /// Predicts the run as it goes, and compares.
    pub fn compare(&self) -> Outcome {
        self.beside_prediction().0
    }

    /// Predicts and compares at the end of the run, and adds it to this machine's records.
    pub fn conclude(&self) -> Outcome {
        let (outcome, record, recorded) = self.beside_prediction();
        if let Some(mut recorded) = recorded
            && let Err(error) = recorded.add(record)
        {
            tracing::warn!(path = %recorded.path().display(), %error, "cannot save memory records");
        }
        outcome
    }

    fn beside_prediction(&self) -> (Outcome, Record, Option<RecordedRuns>) {
        let threads = rayon::current_num_threads() as u64;
        let place = Place::Host { threads };
        let ask = Ask { micro_batch: self.micro_batch, world: self.world, rank: self.rank, place };
        let prediction = self.subject.predict(ask);
        let recorded = self.records.map(|dir| RecordedRuns::load(dir, self.subject, place));
        let calibration = recorded.as_ref().and_then(|recorded| recorded.calibration(&prediction));
        let predicted = calibration.map_or(prediction.peak(), |found| found.peak(&prediction));
        let samples = fit::samples_of_a_rank(self.subject.spec().train.global_batch as u64, self.world);
        let flops = self.subject.predict(Ask { micro_batch: 1, ..ask }).flops.times(samples).total() as f64;
        let record = Record {
            flops_per_second: self.seconds_a_step.map(|seconds| flops / seconds),
            ..Record::new(self.subject, ask, &prediction, self.peak, &self.measured)
        };
        let outcome = Outcome {
            predicted,
            measured: self.peak,
            error: relative(predicted, self.peak.max(1)),
            calibration,
            categories: record.categories.clone(),
        };
        (outcome, record, recorded)
    }
}

impl From<&Outcome> for Comparison {
    fn from(of: &Outcome) -> Self {
        let runs = of.calibration.map_or(0, |calibration| calibration.records as u32);
        Self { predicted: of.predicted, measured: of.measured, runs, categories: of.categories.clone() }
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "memory: {} predicted {}, {} measured (error {:+.1} %)",
            human::bytes(self.predicted),
            Comparison::from(self).basis(),
            human::bytes(self.measured),
            100.0 * self.error
        )
    }
}

#[cfg(test)]
mod tests {
    use coxswain_proto::ids::Bytes;

    use super::*;

    #[test]
    fn frozen_weights_are_a_difference_between_snapshots_and_activations_what_a_micro_batch_took() {
        let zero = ZeroBytes {
            weights: Bytes(40),
            state: Bytes(80),
            grads: Bytes(40),
            comm_buffers: Bytes(1),
            state_unpartitioned: Bytes(80),
            redundancy: Bytes(0),
        };
        let snapshots = MemorySnapshots { opened: 10, loaded: 350, streamed: 0, parts: 0 };
        let measured = snapshots.measured(&zero, 7, 400);
        assert!(measured.contains(&(Category::FrozenWeights, 300)));
        assert!(measured.contains(&(Category::Activations, 400)));
        let measured = MemorySnapshots { streamed: 70, ..snapshots }.measured(&zero, 7, 400);
        assert!(measured.contains(&(Category::FrozenWeights, 370)));
        assert!(measured.contains(&(Category::Activations, 330)));
        assert!(measured.contains(&(Category::Cache, 7)));
        let measured = MemorySnapshots { streamed: 70, parts: 20, ..snapshots }.measured(&zero, 7, 400);
        assert!(measured.contains(&(Category::FrozenWeights, 390)));
    }

    #[test]
    fn an_outcome_is_one_line() {
        let outcome = Outcome {
            predicted: 98 << 20,
            measured: 100 << 20,
            error: -0.02,
            calibration: None,
            categories: Vec::new(),
        };
        assert_eq!(
            outcome.to_string(),
            "memory: 98.0 MiB predicted from sizes alone, 100.0 MiB measured (error -2.0 %)"
        );
    }
}
