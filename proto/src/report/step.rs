//! What one rank did in one step.

use std::{fmt, ops::Range, sync::Arc, time::Duration};

use serde::{Deserialize, Serialize};

use super::{CacheUse, Metric};
use crate::{
    ids::{Bytes, Generation, Step},
    limits::MAX_SKIPPED_SAMPLES,
};

/// What one rank did in one step.
#[derive(Clone, Debug, PartialEq)]
pub struct StepReport {
    /// The membership it was done in; another than the present one is stale and ignored.
    pub generation: Generation,
    /// Which step.
    pub step: Step,
    /// Which epoch its samples belong to.
    pub epoch: u64,
    /// Positions of the epoch's order that this rank consumed.
    pub positions: Vec<Range<u64>>,
    /// Equal on all ranks.
    pub totals: Totals,
    /// Where the time went, as far as the engine knows.
    pub times: StepTimes,
    /// Figures that the coordinator passes on without knowing them.
    pub metrics: Arc<[Metric]>,
    /// Tokens of this rank's samples.
    pub tokens: u64,
    /// Peak bytes in use on this rank during the step.
    pub memory_peak: Bytes,
    /// Times the step was voted down before it was committed.
    pub retries: u32,
    /// The generation of the feature cache that the lease named; 0 in a live step.
    pub cache_generation: u64,
    /// What the feature cache did for this rank.
    pub cache: CacheUse,
    /// Why the step was left out, if it was; its totals are 0 then.
    pub skipped: Option<Skip>,
}

/// Why a step was left out. Weights, moments and the optimizer's count of steps are as before it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Skip {
    /// The cause, the same on all ranks.
    pub cause: SkipCause,
    /// Samples that are to blame, by their index in the data set, as far as it is known: those of a
    /// micro-batch where no single one could be told. At most [`MAX_SKIPPED_SAMPLES`].
    pub samples: Vec<u64>,
}

/// What a step was left out for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SkipCause {
    /// The loss was infinite or not a number, twice.
    Loss,
    /// The norm of the gradient was, twice.
    Gradient,
    /// `train.skip_steps` names it.
    Asked,
    /// The norm of the gradient of the scaled loss was not finite; the loss scale was lowered
    /// (`optimizer.loss_scale`).
    Overflow,
    /// The loss was far above those of the steps before (`train.spike`).
    Spike,
}

impl Skip {
    /// Adds what another rank says of the same step.
    pub fn merge(&mut self, other: &Self) {
        self.samples.extend(&other.samples);
        self.samples.sort_unstable();
        self.samples.dedup();
        self.samples.truncate(MAX_SKIPPED_SAMPLES);
    }
}

impl fmt::Display for Skip {
    /// `its loss was not finite in either of two attempts (samples 17, 23)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 8;
        f.write_str(match self.cause {
            SkipCause::Loss => "its loss was not finite in either of two attempts",
            SkipCause::Gradient => "its gradient was not finite in either of two attempts",
            SkipCause::Asked => "it is listed in train.skip_steps",
            SkipCause::Overflow => "its gradient overflows, and the loss scale is halved",
            SkipCause::Spike => "its loss is far above those of the steps before",
        })?;
        let shown: Vec<_> = self.samples.iter().take(SHOWN).map(u64::to_string).collect();
        let more = if self.samples.len() > SHOWN { ", ..." } else { "" };
        match shown.len() {
            0 => Ok(()),
            1 => write!(f, " (sample {})", shown[0]),
            _ => write!(f, " (samples {}{more})", shown.join(", ")),
        }
    }
}

/// Sums over all ranks, agreed in the step's collective: every rank must report the same bits.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Totals {
    /// Sum of losses over valid elements.
    pub loss_sum: f64,
    /// Valid elements.
    pub valid_count: f64,
    /// Norm of the global gradient before clipping.
    pub grad_norm: f64,
}

impl Totals {
    /// Over all valid elements.
    pub fn mean_loss(&self) -> f64 {
        self.loss_sum / self.valid_count.max(1.0)
    }

    /// The first total on which two ranks differ, bit for bit.
    pub fn difference(&self, other: &Self) -> Option<(&'static str, f64, f64)> {
        [
            ("loss_sum", self.loss_sum, other.loss_sum),
            ("valid_count", self.valid_count, other.valid_count),
            ("grad_norm", self.grad_norm, other.grad_norm),
        ]
        .into_iter()
        .find(|(_, left, right)| left.to_bits() != right.to_bits())
    }

    /// The first total that is NaN or infinite.
    pub fn not_finite(&self) -> Option<(&'static str, f64)> {
        [("loss_sum", self.loss_sum), ("valid_count", self.valid_count), ("grad_norm", self.grad_norm)]
            .into_iter()
            .find(|(_, value)| !value.is_finite())
    }

    /// Mean loss of a valid element.
    pub fn loss(&self) -> f64 {
        if self.valid_count > 0.0 { self.loss_sum / self.valid_count } else { 0.0 }
    }
}

/// Time of one step by what the engine spent it on. What is left of `total` went into the task's own stages
/// ([`stage_times`](super::stage_times)).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepTimes {
    /// Everything.
    pub total: Duration,
    /// Waiting for the data pipeline.
    pub data: Duration,
    /// Clipping and AdamW.
    pub optimizer: Duration,
    /// Collectives.
    pub communication: Duration,
}

impl StepTimes {
    /// Adds another rank's times.
    pub fn add(&mut self, other: &Self) {
        self.total += other.total;
        self.data += other.data;
        self.optimizer += other.optimizer;
        self.communication += other.communication;
    }

    /// The mean of `ranks` times that were added up.
    pub fn mean_of(self, ranks: u32) -> Self {
        let n = ranks.max(1);
        Self {
            total: self.total / n,
            data: self.data / n,
            optimizer: self.optimizer / n,
            communication: self.communication / n,
        }
    }
}
