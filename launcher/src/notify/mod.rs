//! Who is told of a run while it goes on: the user's hook (`cox run --notify`) of a fault, a standstill and
//! the end; the controller of a Kubeflow TrainJob of the progress, where it asks for it.
//!
//! ```text
//! events of the run ─┬▶ standstill (pure: is it to be told) ─▶ hook ─┬─▶ hand_over (a process, for a time)
//!                    └▶ trainjob (the newest every five seconds) ────┤
//! how it ended ──────────────────────────────────────────────────────┘
//! ```
//!
//! A run does not wait for its hook but at its end, and there for a few seconds. What a hook does wrong is a
//! line.

mod hand_over;
mod hook;
mod post;
mod standstill;
mod telling;
mod trainjob;

pub use telling::{HookSources, Notifier, NotifyFlags};
