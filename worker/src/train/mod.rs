//! The trainer thread.

pub mod checkpoint;
pub mod recompute;
pub mod vote;
