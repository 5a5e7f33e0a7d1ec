//! What outlives a coordinator: the run's identity, its memberships, committed steps and checkpoints.
//!
//! The driver appends the records of a batch in one durable transaction before it answers, so whatever a
//! worker or a person was told is on disk. [`Durable`] keeps them in an embedded store; [`Forgetful`] is the
//! null object of a run without a state directory. The store lives on threads of its own: waiting for a disk
//! never holds up the runtime, and reading never holds up a record.

mod chronicle;
pub mod copies;
mod disk;
mod durable;
mod entry;
mod fenced;
mod forgetful;
mod history;
mod identity;
mod inherited;
mod reading;
mod room;
mod rows;
mod thread;

pub use self::{
    chronicle::{Chronicle, exists, read},
    disk::{Disk, Location},
    durable::{Durable, Life, RecoveredHistory},
    entry::LedgerEntry,
    fenced::Fence,
    forgetful::Forgetful,
    history::{Fate, History, Membership},
    identity::{Change, Identity, JournalError, changes},
    inherited::{inherit, is_half_inherited},
    thread::{Journal, JournalReader, JournalThread},
};
