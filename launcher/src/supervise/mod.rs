//! Worker processes from start to end.
//!
//! ```text
//! signals, exits, clock ──▶ machine (pure: decides) ──▶ crew (does: processes, pipes, RPCs)
//! ```
//!
//! No orphan survives: each worker is killed by the kernel when its launcher dies, however it dies (`child`).

pub mod child;
pub mod console;
pub mod machine;
pub mod pump;
