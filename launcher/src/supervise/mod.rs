//! Processes from start to end.
//!
//! ```text
//! signals, exits, orders, clock ──▶ machine (pure: decides) ──▶ voyage (does: processes, RPCs) ──▶ report
//!                                                                crew: how a worker is started
//!                                                                keeper: one process and its output
//!                                                                host: the coordinator, started again when it dies
//! ```
//!
//! No orphan survives: each child is killed by the kernel when its launcher dies, however it dies (`child`).

pub mod child;
pub mod console;
pub mod crew;
pub mod exits;
pub mod failure_file;
mod going;
pub mod host;
pub mod keeper;
pub mod machine;
pub mod orders;
mod outlet;
pub mod pump;
pub mod report;
pub mod signals;
mod tail;
pub mod voyage;
pub mod watcher;
