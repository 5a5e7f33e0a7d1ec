//! Processes that launchers are starting, and that have not registered yet.
//!
//! A launcher that takes a place starts a process for each of its slots, and another one whenever it is told
//! to. Until a process has registered it is not heard: it is executed, its libraries are loaded, it asks what
//! run this is, and opens the data set. Models are read later. So a start is short, and one that is not is
//! held against the others of the run, as a phase like any other (`motion`).
//!
//! ```text
//! launcher joins, or is told ─▶ starting ─▶ registered               others may take as long
//!                                  ├──────▶ its end is reported      the launcher says how
//!                                  └──────▶ named, then given up     and another one is asked for
//! ```

use std::{collections::BTreeMap, time::Duration};

use coxswain_proto::ids::Slot;

use super::{
    motion::{MemberMotion, Pulse},
    report::WorkerPhase,
    time::Timestamp,
};

/// Starts under way, by slot.
#[derive(Clone, Debug, Default)]
pub struct Starts(BTreeMap<Slot, PendingStart>);

/// One of them.
#[derive(Clone, Copy, Debug)]
struct PendingStart {
    since: Timestamp,
    /// It was named for standing still.
    named: bool,
}

/// A start that is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EndedStart {
    /// How long it took.
    pub took: Duration,
    /// It had been named for standing still.
    pub named: bool,
}

impl Starts {
    /// A process is being started at a slot, from now on.
    pub fn begin(&mut self, now: Timestamp, slot: Slot) {
        self.0.insert(slot, PendingStart { since: now, named: false });
    }

    /// As [`Starts::begin`], unless one is known to be.
    pub fn expect(&mut self, now: Timestamp, slot: Slot) {
        self.0.entry(slot).or_insert(PendingStart { since: now, named: false });
    }

    /// The process has made itself known, has ended, or is given up.
    pub fn end(&mut self, now: Timestamp, slot: Slot) -> Option<EndedStart> {
        let PendingStart { since, named } = self.0.remove(&slot)?;
        Some(EndedStart { took: now.since(since), named })
    }

    /// Whether a process is being started at a slot.
    pub fn at(&self, slot: Slot) -> bool {
        self.0.contains_key(&slot)
    }

    /// It is named; false if it has been before.
    pub fn name(&mut self, slot: Slot) -> bool {
        self.0.get_mut(&slot).is_some_and(|start| !std::mem::replace(&mut start.named, true))
    }

    /// All of them, as far as their motion goes: none, for as long as they have not registered.
    pub fn members(&self, now: Timestamp) -> impl Iterator<Item = MemberMotion> {
        self.0.iter().map(move |(slot, start)| {
            let quiet = now.since(start.since);
            let pulse = Pulse { at: now, still: quiet, in_phase: quiet, waits: false };
            MemberMotion { slot: *slot, phase: WorkerPhase::Starting, waits: false, pulse }
        })
    }
}
