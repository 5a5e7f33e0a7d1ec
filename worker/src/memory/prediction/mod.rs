//! What a run will take of a rank's memory, beside what it took.
//!
//! ```text
//! task      sizes (`coxswain_task::memory`)  ─▶  Prediction  ─▶  fit  the micro-batches that fit
//! outcome   a run's memory beside its prediction
//! recorded  what runs of this machine teach the next prediction
//! recompute the mode that `train.recompute: auto` takes
//! ```

pub mod fit;
pub mod outcome;
pub mod recompute;
pub mod recorded;

pub use coxswain_task::{
    dry_run::Flops,
    memory::{Ask, Place, Prediction, Subject, Suggestion},
};
