//! What a rank writes of the steps that it took, apart from what it reports to the coordinator: lines of JSON
//! in `witness/HOST-PID.jsonl` of the run's directory, for `cox audit --against`.
//!
//! ```text
//! {"run":"r-1","step":12,"generation":2,"rank":1,"world":2,"epoch":0,"positions":[{"start":50,"end":52}],
//!  "totals":[4611686018427387904,4620693217682128896,4607182418800017408]}
//! ```
//!
//! A line is written before the step is reported. So of a step that is in the ledger every rank has a line,
//! unless it was killed in between; that can only be the last step of its generation, as no rank begins
//! another one without it.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::report::{SkipCause, Totals};

/// Where the files are, below the run's directory.
pub const DIRECTORY: &str = "witness";
/// Set to 1, ranks write them.
pub const VARIABLE: &str = "COX_WITNESS";

/// One line: what one rank did in one step.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WitnessedStep {
    /// The run's id.
    pub run: String,
    /// Which step.
    pub step: u64,
    /// The membership in which the rank took it. Where a step was taken again, after a fault, the later one
    /// counts.
    pub generation: u64,
    /// Which rank.
    pub rank: u32,
    /// Ranks in that membership.
    pub world: u32,
    /// Which epoch the samples belong to.
    pub epoch: u64,
    /// Positions of the samples that went through this rank's passes, found by the samples themselves. Of a
    /// step that was left out, as far as it came.
    pub positions: Vec<Range<u64>>,
    /// Samples that went through them and stand at no position of the step, by index.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub strangers: Vec<u64>,
    /// Positions of the whole step that this rank was told to leave out: their samples cannot be used.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub left_out: Vec<Range<u64>>,
    /// Why nothing was learned from the step, if so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub skipped: Option<SkipCause>,
    /// Sum of losses, valid elements and the averaged gradient's norm, as bits: equal on all ranks.
    pub totals: [u64; 3],
    /// The file is as large as it may become: this is its last line.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub full: bool,
}

/// The bits of a step's totals.
pub fn bits(totals: &Totals) -> [u64; 3] {
    [totals.loss_sum, totals.valid_count, totals.grad_norm].map(f64::to_bits)
}

impl WitnessedStep {
    /// Mean loss of a valid element.
    pub fn loss(&self) -> f64 {
        let [loss_sum, valid_count, grad_norm] = self.totals.map(f64::from_bits);
        Totals { loss_sum, valid_count, grad_norm }.loss()
    }
}
