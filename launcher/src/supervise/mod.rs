//! Processes from start to end.
//!
//! ```text
//! signals, exits, orders, clock ──▶ machine (pure: decides) ──▶ supervisor (does: processes, RPCs) ─▶ report
//!                                                                group: how a worker is started
//!                                                                process: one process and its output
//!                                                                host: the coordinator, kept alive
//!                                                                standby: when to take it over
//! ```
//!
//! No orphan survives: each child is killed by the kernel when its launcher dies, however it dies (`child`).

mod block;
pub mod child;
pub mod console;
pub mod console_mode;
pub mod exits;
pub mod failure_file;
pub mod group;
pub mod host;
pub mod machine;
mod memory_kills;
pub mod orders;
pub mod process;
pub mod pump;
pub mod report;
mod signal_policy;
pub mod signals;
pub mod standby;
pub mod supervisor;
mod tail;
pub mod watcher;
mod writer;
