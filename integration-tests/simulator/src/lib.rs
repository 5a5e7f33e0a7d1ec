//! A run without tensors, in virtual time: from a fault script (`cox simulate`), or drawn from a seed, as
//! this crate's tests do by the thousand.
//!
//! ```text
//! script     what happens to the run, as a person writes it; or drawn from a seed
//! world      the event queue: delays, lost answers, dead processes; owns everything below
//!   coordinator      the real coordinator core, its records, its lines; killed and recalled
//!   storage    the real journal on a `disk` that fails, in runs that meet such faults
//!   rivals     two coordinators at the same time
//!   flood      those who only read, before the coordinator's real bounds
//!   versions   two versions of the program in one run
//!   process    one worker: the real standing; `session`: calls that repeat themselves; `trainer`: the real
//!              choice of state, and waiting
//!   ring       the collectives of one generation: who has arrived, who is told
//!   node       one launcher: starts processes, reports their ends, obeys respawns
//! checker    what must be true after every event; `report`: what is told at the end
//! ```
//!
//! Nothing here sleeps or reads a clock, and every random number comes from the script's seed, so a seed that
//! failed fails again.
//!
//! What it does not do: compute, so it says nothing about losses; model bandwidth; simulate the wire format.

#![forbid(unsafe_code)]

mod checker;
mod coordinator;
mod disk;
mod drawn;
mod flood;
mod node;
mod process;
mod random;
mod report;
mod ring;
mod rivals;
pub mod script;
pub mod seeds;
mod session;
mod storage;
mod trainer;
mod versions;
mod world;

pub use report::Report;
use script::Script;

/// Plays a script to its end.
pub fn play(script: &Script) -> Report {
    world::World::new(script.clone()).play()
}
