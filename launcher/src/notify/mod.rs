//! `cox run --notify`: tells a program or a URL of a fault, a standstill and the end of a run.
//!
//! ```text
//! events of the run ──▶ standstill (pure: is it to be told) ──▶ hook (a process, for a limited time)
//! how it ended ────────────────────────────────────────────────────────┘
//! ```
//!
//! A run does not wait for its hook but at its end, and there for a few seconds. What a hook does wrong is a
//! line.

mod hook;
mod standstill;
mod telling;

pub use telling::{Notifier, NotifyFlags};
