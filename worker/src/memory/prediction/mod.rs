//! What a run will take of a rank's memory, beside what it took.
//!
//! ```text
//! task      sizes (`coxswain_task::memory`)  ─▶  Prediction  ─▶  fit       the micro-batches that fit
//! outcome   a run's memory beside its prediction                truth     what runs of this machine teach the next prediction
//! ```

pub mod fit;
pub mod outcome;
pub mod truth;

pub use coxswain_task::memory::{Ask, Lever, Place, Prediction, Subject};
