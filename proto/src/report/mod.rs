//! What workers report and everybody shows: plain values, the same for worker, coordinator and launcher.
//!
//! ```text
//! phase    what a worker is doing, where its state is from, the memory it takes there
//! step     what one rank did in one step
//! metric   figures of a step that only their task knows: a name, a unit, a value, and how the values of
//!          ranks combine
//! wire     all of them as messages of the contract
//! ```
//!
//! What this module does not do: read messages of others. That needs errors that name a field, which the
//! coordinator's service has.

mod metric;
mod phase;
mod step;
mod wire;

pub use self::{
    metric::{Merge, MergedMetrics, Metric, highest_learning_rate, stage_times},
    phase::{CheckpointState, PhaseMemory, StateSource, WorkerPhase},
    step::{Skip, SkipCause, StepReport, StepTimes, Totals},
};
pub use crate::cache_plan::CacheUse;
