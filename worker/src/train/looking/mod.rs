//! What is seen of a run, and told: held-out samples, memory and speed, and what it says of itself.
//!
//! ```text
//! held_out    what was found on held-out samples
//! evaluate    held-out error, every rank a part
//! validation  the same while training goes on, and which checkpoint is the best
//! stats       what is kept of memory and speed (`warm_up`: what the first step took beyond the others)
//! compare     memory beside its prediction
//! summary     the run in numbers
//! witness     where a rank writes what it did, apart from what it reports
//! announce    what a run says before its first step (`doubts`: what is probably not meant so)
//! ```

mod announce;
mod compare;
mod doubts;
mod evaluate;
mod held_out;
mod stats;
mod summary;
mod validation;
mod warm_up;
mod witness;

pub(super) use self::{
    announce::describe,
    doubts::warnings,
    evaluate::examples,
    stats::{RunStats, STEPS_OBSERVED},
    summary::{RankPeak, SCOPES, SUMMARY_FILE},
    validation::ValidationState,
    witness::Witness,
};
pub use self::{
    evaluate::evaluate_run,
    held_out::{HeldOutError, MAX_MEASURES},
    summary::Summary,
};
