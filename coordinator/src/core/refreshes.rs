//! Memory as people ask for it: what ranks have reported, and who waits for fresh reports.

use std::{collections::BTreeSet, sync::Arc};

use coxswain_proto::{ids::Slot, limits};

use super::{
    action::{Action, Reply},
    event::Ticket,
    memory::{MemoryLedger, MemoryReport, RankMemory},
    news::News,
    roster::Roster,
    time::Timestamp,
};

/// What ranks have reported, and who waits for more.
#[derive(Clone, Debug, Default)]
pub struct Memory {
    /// What ranks have reported.
    pub ledger: MemoryLedger,
    refreshes: Vec<Refresh>,
    /// When ranks were asked last.
    asked: Option<Timestamp>,
}

/// A call that waits for fresh reports.
#[derive(Clone, Debug)]
struct Refresh {
    ticket: Ticket,
    missing: BTreeSet<Slot>,
    deadline: Timestamp,
}

impl Memory {
    /// A rank has reported.
    pub fn record_report(&mut self, slot: Slot, report: MemoryReport) {
        self.ledger.record_report(slot, report);
        for refresh in &mut self.refreshes {
            refresh.missing.remove(&slot);
        }
    }

    /// Whether reports are new enough that nobody needs to be asked: readers cannot make work for ranks.
    pub fn is_fresh(&self, now: Timestamp) -> bool {
        self.asked.is_some_and(|asked| now.since(asked) < limits::MEMORY_REFRESH_PAUSE)
    }

    /// Ranks are asked, and a call waits for a report of every worker that is there.
    pub fn refresh(&mut self, now: Timestamp, ticket: Ticket, roster: &Roster) {
        self.asked = Some(now);
        self.wait(now, ticket, roster.living().map(|worker| worker.slot()).collect());
    }

    /// The reports that were asked for last are of the time before a reset: the next call gets newer ones.
    pub fn outdate(&mut self) {
        self.asked = None;
    }

    /// A call waits for the reports that were asked for last; false if all of them have come.
    pub fn join(&mut self, now: Timestamp, ticket: Ticket) -> bool {
        let missing = self.refreshes.last().map(|refresh| refresh.missing.clone());
        let waits = missing.is_some();
        missing.into_iter().for_each(|missing| self.wait(now, ticket, missing));
        waits
    }

    fn wait(&mut self, now: Timestamp, ticket: Ticket, missing: BTreeSet<Slot>) {
        let deadline = now.after(limits::MEMORY_REFRESH_TIMEOUT);
        self.refreshes.push(Refresh { ticket, missing, deadline });
    }

    /// When to answer those that wait, whatever has come.
    pub fn deadline(&self) -> Option<Timestamp> {
        self.refreshes.iter().map(|refresh| refresh.deadline).min()
    }

    /// Answers those whose reports are all in, or whose time is up; everyone if no further report
    /// `will_come`.
    pub fn answer(&mut self, now: Timestamp, roster: &Roster, will_come: bool, out: &mut Vec<Action>) {
        let ready = |refresh: &Refresh| !will_come || refresh.missing.is_empty() || refresh.deadline <= now;
        let (ready, waiting): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.refreshes).into_iter().partition(ready);
        self.refreshes = waiting;
        if !ready.is_empty() {
            let table = self.table(roster);
            out.push(Action::Publish(News::Memory(table.clone())));
            out.extend(
                ready.iter().map(|refresh| Action::Reply(refresh.ticket, Ok(Reply::Memory(table.clone())))),
            );
        }
    }

    /// What ranks have reported, in slot order; of a world of more than can be listed, the first.
    pub fn table(&self, roster: &Roster) -> Arc<Vec<RankMemory>> {
        let table = roster.workers().take(limits::MAX_LISTED_RANKS).map(|worker| RankMemory {
            slot: worker.slot(),
            host: worker.claim.host.clone(),
            phases: self.ledger.phases(worker.slot()),
            comparison: self.ledger.comparison(worker.slot()),
        });
        Arc::new(table.collect())
    }
}
