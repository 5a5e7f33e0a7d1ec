//! Do a run's books add up? Every sample of every epoch must have been consumed by exactly one committed step, or be listed as
//! quarantined there.
//!
//! The books are the coordinator's ledger: one row for each committed step, with the positions of the epoch's order that its ranks
//! consumed. This module does not ask the code that planned them. It lays the rows' ranges side by side and looks for gaps and overlaps,
//! which is simple enough to be believed; only how far the last epoch should reach is taken from the size of the batch.

mod books;
mod coverage;
pub mod source;

pub use books::{Books, CacheRange, CommittedStep, EpochAccount, Fault, Membership, count};
