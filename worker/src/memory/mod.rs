//! Peak memory, measured: what this process holds, by phase, in three scopes.
//!
//! | scope | on a CPU | on a GPU (a [`Gauge`]) |
//! |---|---|---|
//! | in use | bytes of the [`allocator`](CountingAllocator), exact | the same, in passes that are watched |
//! | reserved | the allocator's anonymous pages | what that allocator holds from the driver |
//! | driver | resident set of the process, mapped files included | what is taken of the GPU, by whomever |
//!
//! A [`Meter`] is told which phase begins; it keeps the peak of each. On a GPU it watches the first passes,
//! those that are larger than all before, and one in 64. Peaks between two snapshots are exact on a CPU
//! for `in use`; for the other two they are exact whenever the phase raised the process's high-water mark,
//! and otherwise what was seen at its end. What a run will take before it is launched is [`prediction`]'s to
//! say.
//!
//! [`guarded`] work that goes over `memory.capacity`, or whose device refuses, ends as a value, as does
//! [`guarded_unless`] work that is called off; [`Demand`] and [`Pressure`] see it coming. Each rank's [peaks
//! over time](timeline) are a file in the run's directory.

mod demand;
mod fault;
mod gauge;
pub mod killed;
mod meter;
mod overrun;
mod peaks;
pub mod prediction;
mod pressure;
mod resident;
pub mod timeline;

pub use coxswain_nn::memory::allocator::peak;
pub use coxswain_nn::memory::{
    CountingAllocator, GuardedError, Overrun, after_refusal, check, guarded, guarded_again, guarded_unless,
    in_use, listen, refused,
};
pub use coxswain_proto::memory::Category;

pub use demand::Demand;
pub use gauge::{Gauge, PhasePeak};
pub use meter::{Attempt, Meter};
pub use overrun::{HeldBytes, OutOfMemory};
pub use pressure::Pressure;
pub use resident::Resident;
