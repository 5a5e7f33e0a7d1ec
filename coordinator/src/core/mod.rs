//! The coordinator's decisions, and nothing else: no clock, no random numbers, no IO, no tokio, no prost.
//!
//! ```text
//!   calls, closed lines, time                       answers, directives, records, news
//!   ──────── Event ────────▶  Machine::handle  ──────── Vec<Action> ────────▶
//!                             Machine::next_deadline
//! ```
//!
//! The driver hands in the time with every event and carries out the actions, so the same machine serves a
//! run, a test transcript and a simulation. Every decision that people may ask about carries a typed
//! [`reason`]. Imports only go down this list:
//!
//! ```text
//! machine     decides what follows from an event     invariants  what holds after each
//!
//! owners of a run's state, each with its questions
//! fleet       who is there: roster, worker, nodes, starts, motion, line; who is gone: losses
//! progress    how far the run is: ledger, stragglers, leases, caching, cache, quarantine, checkpoints
//! faults      what was lost, and what it has cost    refreshes   who waits for memory reports
//! phase       where the run is                       voice       what people were told
//! health      slots whose hardware has shown faults
//!
//! values
//! config, past                                       what a run is made from
//! event ─▶ ... ─▶ action                             what happens, and what is to be done
//! failure, refusal, reason, news, status, memory     what people hear
//! report, time                                       what everybody needs
//! ```

pub mod action;
pub mod cache;
mod caching;
pub mod checkpoints;
mod config;
pub mod event;
pub mod failure;
mod faults;
mod fleet;
pub mod health;
pub mod invariants;
pub mod leases;
pub mod ledger;
mod line;
mod losses;
pub mod machine;
pub mod memory;
pub mod motion;
pub mod news;
pub mod nodes;
pub mod past;
pub mod phase;
mod progress;
pub mod quarantine;
pub mod reason;
mod refreshes;
pub mod refusal;
pub mod report;
pub mod roster;
pub mod slot_health;
pub mod starts;
pub mod status;
pub mod stragglers;
pub mod time;
mod voice;
mod worker;

#[cfg(test)]
pub(crate) mod tests;
