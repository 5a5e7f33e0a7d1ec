//! Shard leases: how far ahead of the committed steps the ranks may go.
//!
//! ```text
//! steps   committed ─┬────────────── window, at most 32 steps ──────────────┐
//! rank 0             ├──────────────────── held ──────────────┤
//! rank 1             ├───────────────────────────── held ───────────────────┤
//! ```
//!
//! All ranks share one window of [`LEASE_STEPS`] ahead of the commits; it ends earlier where it is not
//! decided yet where the next step takes its features from. Each rank holds a part of it that is prolonged
//! with one of the rank's own reports, so that a rank never waits for a grant while the coordinator answers,
//! and trains on through about half a window when it does not. Ranks are due in turn: renewing thousands of
//! them in one step would hold up everybody's reports of it.

use coxswain_proto::{
    cache_plan::CacheGeneration,
    ids::{Generation, LeaseId, Rank, Step},
    limits::LEASE_STEPS,
};

/// A rank is prolonged when it holds no more than this.
const HALF: u64 = LEASE_STEPS / 2;

/// How far the window reaches at most when steps below `committed` are.
pub fn furthest(committed: Step, total: Step) -> Step {
    Step(committed.0.saturating_add(LEASE_STEPS).min(total.0))
}

/// The right to consume one slice of every global batch in a range of steps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lease {
    /// Which.
    pub id: LeaseId,
    /// In which membership.
    pub generation: Generation,
    /// From this step.
    pub first: Step,
    /// Up to, not including, this step.
    pub end: Step,
    /// Which slice.
    pub slice: Rank,
    /// How many slices there are.
    pub slices: u32,
    /// Where all of the steps take their features from.
    pub cache_phase: LeaseCachePhase,
}

/// Where the steps of a lease take their features from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LeaseCachePhase {
    /// They are computed; everything trains.
    Live {
        /// The generation that served last.
        kept: Option<CacheKey>,
    },
    /// From this generation.
    Cached(CacheKey),
}

/// A generation of the feature cache, as workers know it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheKey {
    /// Which, and since when.
    pub generation: CacheGeneration,
    /// Directory in the store, once it is known.
    pub namespace: Option<String>,
}

/// The window that all ranks of one generation share, and what each of them holds of it.
#[derive(Clone, Debug)]
pub struct LeaseWindow {
    generation: Generation,
    total: Step,
    end: Step,
    held: Vec<Step>,
    next_id: u64,
}

impl LeaseWindow {
    /// An empty window at `first_step`.
    pub fn new(generation: Generation, world: u32, first_step: Step, total: Step) -> Self {
        Self { generation, total, end: first_step, held: vec![first_step; world as usize], next_id: 1 }
    }

    /// The first step that no rank may run yet.
    pub fn end(&self) -> Step {
        self.end
    }

    /// The first step that a rank may not run yet.
    pub fn end_of(&self, rank: Rank) -> Step {
        self.held.get(rank.0 as usize).copied().unwrap_or(self.end)
    }

    /// Where the window should end.
    pub fn target(&self, committed: Step) -> Step {
        furthest(committed, self.total).max(self.end)
    }

    /// Moves the end of the window; it never moves back.
    pub fn extend(&mut self, end: Step) {
        self.end = self.end.max(end).min(self.total);
    }

    /// After a restart of the coordinator: whatever a rank may have been granted lies in the window.
    pub fn assume_all_held(&mut self) {
        self.held.fill(self.end);
    }

    /// Whether a rank should be given more, if there is more.
    pub fn due(&self, rank: Rank, committed: Step) -> bool {
        let ahead = self.end_of(rank).0.saturating_sub(committed.0);
        let its_cache_phase = (committed.0 + u64::from(rank.0)).is_multiple_of(HALF);
        self.end_of(rank) < self.total && (ahead <= HALF || (its_cache_phase && ahead < LEASE_STEPS))
    }

    /// Ranks that would run dry without another report: next to nothing of what they hold is left. `owed` is
    /// the next step of each.
    pub fn dry(&self, owed: impl Iterator<Item = Step>) -> Vec<Rank> {
        let ranks = (0..).map(Rank).zip(self.held.iter().zip(owed));
        let dry = ranks.filter(|(_, (held, owed))| **held < self.total && held.0 <= owed.0 + HALF / 2);
        dry.map(|(rank, _)| rank).collect()
    }

    /// Gives a rank the rest of the window: a lease for each cache phase, which `cache_phase` tells with the
    /// step it ends at.
    pub fn grant(
        &mut self,
        rank: Rank,
        cache_phase: impl Fn(Step) -> Option<(LeaseCachePhase, Step)>,
    ) -> Vec<Lease> {
        let Some(held) = self.held.get_mut(rank.0 as usize) else { return Vec::new() };
        let first = std::mem::replace(held, self.end.max(*held));
        self.leases(rank, first, cache_phase)
    }

    /// What a rank holds now, for a line that was opened again; nothing when there is nothing left to run.
    pub fn replay(
        &mut self,
        rank: Rank,
        committed: Step,
        cache_phase: impl Fn(Step) -> Option<(LeaseCachePhase, Step)>,
    ) -> Vec<Lease> {
        if let Some(held) = self.held.get_mut(rank.0 as usize) {
            *held = self.end.max(*held);
        }
        self.leases(rank, committed, cache_phase)
    }

    fn leases(
        &mut self,
        rank: Rank,
        first: Step,
        cache_phase: impl Fn(Step) -> Option<(LeaseCachePhase, Step)>,
    ) -> Vec<Lease> {
        let (mut leases, mut first) = (Vec::new(), first);
        while first < self.end {
            let Some((cache_phase, until)) = cache_phase(first) else { break };
            let (id, end) = (LeaseId(self.next_id), until.min(self.end));
            self.next_id += 1;
            let (generation, slices) = (self.generation, self.held.len() as u32);
            leases.push(Lease { id, generation, first, end, slice: rank, slices, cache_phase });
            first = end;
        }
        leases
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOTAL: Step = Step(1000);

    fn window(world: u32) -> LeaseWindow {
        LeaseWindow::new(Generation(1), world, Step(0), TOTAL)
    }

    fn live(_: Step) -> Option<(LeaseCachePhase, Step)> {
        Some((LeaseCachePhase::Live { kept: None }, TOTAL))
    }

    /// Every rank reports every step, and each that is due is granted what there is. How many were, after
    /// each step.
    fn grants(window: &mut LeaseWindow, world: u32, steps: u64) -> Vec<usize> {
        let mut counts = Vec::new();
        for committed in (0..steps).map(Step) {
            let due: Vec<_> = (0..world).map(Rank).filter(|rank| window.due(*rank, committed)).collect();
            if !due.is_empty() {
                window.extend(window.target(committed));
            }
            counts.push(due.iter().map(|rank| window.grant(*rank, live).len()).sum());
        }
        counts
    }

    #[test]
    fn ranks_are_prolonged_in_turn_and_always_hold_half_a_window() {
        let (mut window, world) = (window(64), 64);
        let counts = grants(&mut window, world, 200);
        assert_eq!(counts[0], 64, "everybody begins with a whole window");
        assert_eq!(counts[1..100].iter().max(), Some(&4), "then a sixteenth at a time");
        for rank in (0..world).map(Rank) {
            assert!(window.end_of(rank).0 - 199 > HALF);
        }
    }

    #[test]
    fn a_lease_never_straddles_a_cache_phase() {
        let mut window = window(1);
        window.extend(Step(10));
        let cache_phase =
            |step: Step| Some((LeaseCachePhase::Live { kept: None }, Step(step.0 - step.0 % 4 + 4)));
        let steps: Vec<_> =
            window.grant(Rank(0), cache_phase).iter().map(|lease| lease.first.0..lease.end.0).collect();
        assert_eq!(steps, [0..4, 4..8, 8..10]);
        assert_eq!(window.replay(Rank(0), Step(7), cache_phase).len(), 2);
    }

    #[test]
    fn a_rank_that_has_nothing_left_to_report_is_found() {
        let mut window = window(2);
        window.extend(Step(32));
        window.grant(Rank(0), live);
        window.grant(Rank(1), live);
        assert_eq!(window.dry([Step(32), Step(0)].into_iter()), [Rank(0)]);
        window.extend(TOTAL);
        window.assume_all_held();
        assert_eq!(window.dry([TOTAL, TOTAL].into_iter()), [] as [Rank; 0]);
    }
}
