//! The coordinator's decisions, and nothing else: no clock, no random numbers, no IO, no tokio, no prost.
//!
//! ```text
//!   calls, closed lines, time                       answers, directives, records, news
//!   ──────── Event ────────▶  Machine::handle  ──────── Vec<Action> ────────▶
//!                             Machine::next_deadline
//! ```
//!
//! The driver hands in the time with every event and carries out the actions, so the same machine serves a run, a test transcript
//! and a simulation. Every decision that people may ask about carries a typed [`reason`].

pub mod action;
pub mod cache;
pub mod checkpoints;
pub mod event;
pub mod failure;
pub mod invariants;
pub mod leases;
pub mod ledger;
pub mod machine;
pub mod memory;
pub mod motion;
pub mod news;
pub mod nodes;
pub mod past;
pub mod phase;
pub mod quarantine;
pub mod reason;
pub mod refusal;
pub mod report;
pub mod roster;
pub mod starts;
pub mod status;
pub mod time;

#[cfg(test)]
pub(crate) mod tests;
