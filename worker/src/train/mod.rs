//! The trainer thread.

pub mod checkpoint;
pub mod vote;
