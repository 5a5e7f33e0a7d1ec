//! A committed step as the journal keeps it.

use std::ops::Range;

use coxswain_proto::ids::{Generation, Rank, Step};
use serde::{Deserialize, Serialize};

use crate::core::report::{CommittedStep, Skip};

/// One committed step as the ledger shows it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LedgerEntry {
    /// Which step.
    pub step: Step,
    /// Which epoch its samples belong to.
    pub epoch: u64,
    /// The membership that did it.
    pub generation: Generation,
    /// Ranks in that membership.
    pub world: u32,
    /// Positions of the epoch's order, over all ranks.
    pub positions: Range<u64>,
    /// Mean loss of a valid element; 0 when no report of it was left.
    pub loss: f64,
    /// Times the step was voted down before it was committed.
    #[serde(default)]
    pub retries: u32,
    /// The generation of the feature cache that it took its features from; 0 for none.
    #[serde(default)]
    pub cache_generation: u64,
    /// Samples whose features were there, over all ranks.
    #[serde(default)]
    pub cache_hits: u64,
    /// Samples whose features were computed.
    #[serde(default)]
    pub cache_misses: u64,
    /// Ranks whose reports were there when it was committed.
    #[serde(default)]
    pub reports: u32,
    /// Positions among them that were left out: their samples failed on several workers.
    #[serde(default)]
    pub left_out: Vec<Range<u64>>,
    /// Why the step was left out, if it was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub skipped: Option<Skip>,
}

impl LedgerEntry {
    /// The positions that a rank consumed.
    pub fn of_rank(&self, rank: Rank) -> Range<u64> {
        let batch = coxswain_proto::plan::Batch { epoch: self.epoch, positions: self.positions.clone() };
        batch.of_rank(rank, self.world)
    }

    /// The loss that was learned from: none of a step that was left out, or that has no report.
    pub fn learned(&self) -> Option<f64> {
        (self.skipped.is_none() && self.reports > 0).then_some(self.loss)
    }
}

impl From<&CommittedStep> for LedgerEntry {
    fn from(step: &CommittedStep) -> Self {
        Self {
            step: step.step,
            epoch: step.consumed.epoch,
            generation: step.generation,
            world: step.world,
            positions: step.consumed.positions.clone(),
            loss: step.totals.loss(),
            retries: step.retries,
            cache_generation: step.cache_generation,
            cache_hits: step.cache.hits,
            cache_misses: step.cache.misses,
            reports: step.reports,
            left_out: step.consumed.left_out.clone(),
            skipped: step.skipped.clone(),
        }
    }
}
