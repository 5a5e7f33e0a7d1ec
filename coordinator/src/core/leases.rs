//! Shard leases: how far ahead of the committed steps the ranks may go.
//!
//! A rank holds one contiguous window of steps. It is granted [`LEASE_STEPS`] ahead and prolonged when half of it is committed, so
//! that a rank never waits for a grant while the coordinator answers, and trains on through half a window when it does not.

use coxswain_proto::{
    ids::{Generation, LeaseId, Rank, Step},
    limits::LEASE_STEPS,
};

use super::action::Lease;

/// The window that all ranks of one generation share.
#[derive(Clone, Debug)]
pub struct LeaseWindow {
    generation: Generation,
    world: u32,
    total: Step,
    end: Step,
    next_id: u64,
}

impl LeaseWindow {
    /// An empty window at `first_step`.
    pub fn new(generation: Generation, world: u32, first_step: Step, total: Step) -> Self {
        Self { generation, world, total, end: first_step, next_id: 1 }
    }

    /// The first step nobody may run yet.
    pub fn end(&self) -> Step {
        self.end
    }

    /// Prolongs the window if at least half of it is committed; the lease of every rank, in rank order, if so.
    pub fn prolong(&mut self, committed: Step) -> Option<Vec<Lease>> {
        let ahead = self.end.0.saturating_sub(committed.0);
        let end = Step(committed.0.saturating_add(LEASE_STEPS).min(self.total.0));
        if ahead > LEASE_STEPS / 2 || end <= self.end {
            return None;
        }
        let first = std::mem::replace(&mut self.end, end);
        Some((0..self.world).map(|rank| self.lease(Rank(rank), first)).collect())
    }

    /// What a rank holds now, for a line that was opened again; absent when there is nothing left to run.
    pub fn replay(&mut self, rank: Rank, committed: Step) -> Option<Lease> {
        (committed < self.end).then(|| self.lease(rank, committed))
    }

    fn lease(&mut self, rank: Rank, first: Step) -> Lease {
        let id = LeaseId(self.next_id);
        self.next_id += 1;
        Lease { id, generation: self.generation, first, end: self.end, slice: rank, slices: self.world }
    }
}
