//! The line between a worker's session (gRPC, async) and its trainer (one OS thread): directives one way,
//! reports the other.
//!
//! The trainer sees only [`Link`]. [`SoloLink`] is its null object: a world of one that owns every sample,
//! takes no commands and drops its reports, so a worker can train from a run spec alone.

mod cache;
mod contract;
mod solo;
pub(crate) mod spans;

pub use cache::{CacheNamespace, CachePhase, StepShare};
pub use contract::{Assignment, BadSample, CheckpointNews, Commands, Link, LinkError, Report, Start};
pub use coxswain_proto::report::{PhaseMemory, StateSource, StepReport, StepTimes, WorkerPhase as Phase};
pub use solo::{Follower, SoloLink};
