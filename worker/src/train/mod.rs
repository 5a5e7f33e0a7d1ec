//! The trainer thread.

pub mod recompute;
