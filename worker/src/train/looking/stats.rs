//! What is kept of a run's memory, speed and steps, for tables, predictions, its summary and audits.

use super::{summary::Summary, warm_up::WarmUp, witness::Witness};
use crate::memory::{Meter, prediction::outcome::MemorySnapshots};
use crate::train::InjectedFaults;

/// Steps after which every buffer that steps keep has been made.
pub(in crate::train) const STEPS_OBSERVED: usize = 2;

/// What is kept of a run's memory and speed.
pub(in crate::train) struct RunStats {
    pub meter: Meter,
    /// What was in use at moments that tell categories apart.
    pub snapshots: MemorySnapshots,
    /// The run in numbers, as far as this process has seen it.
    pub summary: Summary,
    /// What the first step of this process took beyond the others.
    pub warm_up: WarmUp,
    /// Steps that the run was to have when the checkpoint was written that it goes on from.
    pub planned_before: Option<u64>,
    /// Writes what this rank did in each step; none unless it was asked for.
    pub witness: Option<Witness>,
    /// What this process was told to get wrong, for tests.
    pub injected: InjectedFaults,
}
