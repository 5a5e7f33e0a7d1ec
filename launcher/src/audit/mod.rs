//! Does a run's ledger add up? Every sample of every epoch must have been consumed by exactly one committed
//! step, or be listed as quarantined there.
//!
//! The records are the coordinator's ledger: one row for each committed step, with the positions of the
//! epoch's order that its ranks consumed. This module does not ask the code that planned them. It lays the
//! rows' ranges side by side and looks for gaps and overlaps, which is simple enough to be believed; only how
//! far the last epoch should reach is taken from the size of the batch.
//!
//! The ledger is the coordinator's own word. [`against`] holds it against what ranks have written themselves.

pub mod against;
mod coverage;
mod records;
pub mod source;
mod testimony;

pub use records::{
    CacheRange, Change, CommittedStep, EpochAccount, Fault, Membership, RunRecords, SetAccount, count,
};
pub use testimony::Testimony;
