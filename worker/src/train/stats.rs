//! What is kept of a run's memory and speed, for tables, predictions and its summary.

use super::{fault::InjectedFaults, summary::Summary, warm_up::WarmUp};
use crate::memory::{Meter, prediction::outcome::MemorySnapshots};

/// Steps after which every buffer that steps keep has been made.
pub(super) const STEPS_OBSERVED: usize = 2;

/// What is kept of a run's memory and speed.
pub(super) struct RunStats {
    pub meter: Meter,
    /// What was in use at moments that tell categories apart.
    pub snapshots: MemorySnapshots,
    /// The run in numbers, as far as this process has seen it.
    pub summary: Summary,
    /// What the first step of this process took beyond the others.
    pub warm_up: WarmUp,
    /// Steps that the run was to have when the checkpoint was written that it goes on from.
    pub planned_before: Option<u64>,
    /// What this process was told to get wrong, for tests.
    pub injected: InjectedFaults,
}
