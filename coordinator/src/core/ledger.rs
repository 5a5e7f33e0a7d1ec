//! The step ledger: which steps are committed, and who has reported the ones in flight.
//!
//! ```text
//!            committed                 lease end
//! steps  ────────┤ o o o o . . . . . . . ├──────
//!                 in flight: some ranks have reported
//! ```
//!
//! A step is committed when every rank has reported it with the same totals, and after all steps before it.
//! Ranks report in order, so a rank's reports are one number: the next step it owes. Memory is bounded by the
//! lease window.
//!
//! A generation may end while the last word of a lost rank is missing. That its steps were done by all is
//! proven by the state from which the next generation starts; [`StepLedger::settle`] commits them then, from
//! what the other ranks have reported.

use std::{
    collections::{HashMap, VecDeque},
    ops::Range,
    sync::Arc,
};

use coxswain_proto::{
    ids::{Generation, Rank, Slot, Step, WorkerId},
    order::LeftOut,
    plan::{self, Plan},
};

use super::report::{
    CacheUse, CommittedStep, DataConsumption, MemoryPeak, MergedMetrics, Skip, StepReport, StepTimes, Totals,
};

/// Steps of one generation.
#[derive(Clone, Debug)]
pub struct StepLedger {
    plan: Plan,
    generation: Generation,
    members: HashMap<WorkerId, Rank>,
    committed: Step,
    owed: Vec<Step>,
    open: VecDeque<OpenStep>,
    left_out: LeftOut,
}

#[derive(Clone, Debug, Default)]
struct OpenStep {
    reported: u32,
    /// As in [`UnreportedStep`].
    found_by: Option<Generation>,
    witness: Rank,
    totals: Totals,
    times: StepTimes,
    metrics: MergedMetrics,
    tokens: u64,
    memory_peak: MemoryPeak,
    retries: u32,
    cache_generation: u64,
    cache: CacheUse,
    skipped: Option<Skip>,
}

/// What a rank may report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Due {
    /// Lease ends before this step.
    pub lease_end: Step,
    /// The generation of the feature cache that the lease of the reported step names; 0 for none.
    pub cache_generation: u64,
}

/// What is known of a step that no rank could report.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct UnreportedStep {
    /// The generation that found it done by a checkpoint. Which one took it nobody knows: not always the
    /// last, for it may have begun before the checkpoint was known.
    pub found_by: Option<Generation>,
    /// The generation of the feature cache that its leases named; 0 for none.
    pub cache_generation: u64,
    /// Why it was left out, if a checkpoint says that it was.
    pub skipped: Option<Skip>,
}

/// Why a report cannot be true.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Fault {
    /// Steps were left out.
    #[error("reported step {reported}, but step {owed} is next: reports must come in order")]
    Gap {
        /// The report's.
        reported: Step,
        /// What was due.
        owed: Step,
    },
    /// Samples were consumed without a lease.
    #[error("reported step {reported}, but its lease ends before step {end}")]
    BeyondLease {
        /// The report's.
        reported: Step,
        /// End of the lease.
        end: Step,
    },
    /// Features of another generation of the cache.
    #[error("used {} for step {step}, but its lease assigns {}", cached(found), cached(due))]
    Cache {
        /// The report's.
        step: Step,
        /// As reported.
        found: u64,
        /// As leased.
        due: u64,
    },
    /// Other samples than the step's.
    #[error(
        "consumed positions {found:?} of epoch {found_epoch} in step {step}, but was assigned {due:?} of epoch {due_epoch}"
    )]
    Positions {
        /// The report's.
        step: Step,
        /// As reported.
        found: Vec<Range<u64>>,
        /// As reported.
        found_epoch: u64,
        /// As planned.
        due: Range<u64>,
        /// As planned.
        due_epoch: u64,
    },
    /// A committed step has a loss and a gradient.
    #[error("reported {total} = {found} for step {step}: training has diverged, or the data holds NaN")]
    NotFinite {
        /// The report's.
        step: Step,
        /// Which total.
        total: &'static str,
        /// As reported.
        found: f64,
    },
    /// Ranks do not agree whether a step was left out, or why.
    #[error("disagrees with rank {witness} on whether step {step} was left out, or on the reason")]
    LeftOut {
        /// The report's.
        step: Step,
        /// The rank that reported first.
        witness: Rank,
    },
    /// Ranks do not agree on what all of them must know.
    #[error("reported {total} = {found:?} for step {step}, but rank {witness} reported {expected:?}")]
    Totals {
        /// The report's.
        step: Step,
        /// Which total.
        total: &'static str,
        /// As reported.
        found: f64,
        /// The rank that reported first.
        witness: Rank,
        /// What that was.
        expected: f64,
    },
}

impl StepLedger {
    /// Nothing is in flight, and `first_step` is the first that is not committed. `members` are in rank
    /// order.
    pub fn new(plan: Plan, generation: Generation, members: &[WorkerId], first_step: Step) -> Self {
        Self {
            plan,
            generation,
            members: members.iter().copied().zip((0..).map(Rank)).collect(),
            committed: first_step,
            owed: vec![first_step; members.len()],
            open: VecDeque::new(),
            left_out: LeftOut::default(),
        }
    }

    /// Leaves these positions out of every step.
    pub fn without(self, left_out: LeftOut) -> Self {
        Self { left_out, ..self }
    }

    /// The membership whose steps these are.
    pub fn generation(&self) -> Generation {
        self.generation
    }

    /// A worker's position, if it is a member.
    pub fn rank_of(&self, worker: WorkerId) -> Option<Rank> {
        self.members.get(&worker).copied()
    }

    /// The first step that is not committed.
    pub fn committed(&self) -> Step {
        self.committed
    }

    /// The next step that each rank will report, in rank order.
    pub fn all_owed(&self) -> impl Iterator<Item = Step> {
        self.owed.iter().copied()
    }

    /// Steps that some rank has reported and that are not committed.
    pub fn in_flight(&self) -> usize {
        self.open.len()
    }

    /// True when every step of the run is committed.
    pub fn done(&self) -> bool {
        self.committed.0 >= self.plan.total_steps()
    }

    /// Takes a rank's report of a step that it holds a lease of. A repeated report has no effect; one of
    /// another generation neither.
    pub fn record_report(
        &mut self,
        rank: Rank,
        slot: Slot,
        report: &StepReport,
        due: Due,
    ) -> Result<(), Fault> {
        let owed = self.owed[rank.0 as usize];
        if report.generation != self.generation || report.step < owed {
            return Ok(());
        }
        if report.step > owed {
            return Err(Fault::Gap { reported: report.step, owed });
        }
        if report.step >= due.lease_end {
            return Err(Fault::BeyondLease { reported: report.step, end: due.lease_end });
        }
        if report.cache_generation != due.cache_generation {
            let (found, due) = (report.cache_generation, due.cache_generation);
            return Err(Fault::Cache { step: report.step, found, due });
        }
        if let Some((total, found)) = report.totals.not_finite() {
            return Err(Fault::NotFinite { step: report.step, total, found });
        }
        self.check_positions(rank, report)?;
        self.add(rank, slot, report)?;
        self.owed[rank.0 as usize] = Step(owed.0 + 1);
        Ok(())
    }

    /// Commits the next step if every rank has reported it.
    pub fn commit(&mut self) -> Option<Arc<CommittedStep>> {
        let world = self.world();
        let open = self.open.pop_front_if(|open| open.reported == world)?;
        Some(self.committed_from(open))
    }

    /// Whether a rank has reported every step of the run.
    pub fn has_reported_all(&self, Rank(rank): Rank) -> bool {
        self.owed.get(rank as usize).is_some_and(|owed| owed.0 >= self.plan.total_steps())
    }

    /// Commits all steps before `until`, which every rank has done, from the reports that are there; nothing
    /// if a step has none. With `blind`, steps without any report are committed, too: their totals stay
    /// unknown, and `unseen` says what is known.
    pub fn settle(
        &mut self,
        until: Step,
        blind: bool,
        unseen: impl Fn(Step) -> UnreportedStep,
    ) -> Option<Vec<Arc<CommittedStep>>> {
        let missing = until.0.saturating_sub(self.committed.0);
        if !blind && missing > self.open.len() as u64 {
            return None;
        }
        let steps = (0..missing).map(|_| {
            let open = self.open.pop_front().unwrap_or_else(|| {
                let UnreportedStep { found_by, cache_generation, skipped } = unseen(self.committed);
                OpenStep { found_by, cache_generation, skipped, ..OpenStep::default() }
            });
            self.committed_from(open)
        });
        let steps = steps.collect();
        for owed in &mut self.owed {
            // What is committed is not owed any more.
            *owed = (*owed).max(self.committed);
        }
        Some(steps)
    }

    fn committed_from(&mut self, open: OpenStep) -> Arc<CommittedStep> {
        let step = self.committed;
        let batch = self.plan.batch(step);
        let left_out = self.left_out.in_batch(&batch);
        let (generation, world) = open.found_by.map_or((self.generation, self.world()), |finder| (finder, 0));
        self.committed = Step(step.0 + 1);
        Arc::new(CommittedStep {
            step,
            total_steps: self.plan.total_steps(),
            consumed: DataConsumption { epoch: batch.epoch, positions: batch.positions, left_out },
            generation,
            world,
            totals: open.totals,
            times: open.times.mean_of(open.reported),
            metrics: open.metrics.finish(),
            tokens: open.tokens,
            memory_peak: open.memory_peak,
            retries: open.retries,
            cache_generation: open.cache_generation,
            cache: open.cache.mean_of(open.reported),
            reports: open.reported,
            skipped: open.skipped,
        })
    }

    fn world(&self) -> u32 {
        self.owed.len() as u32
    }

    fn check_positions(&mut self, rank: Rank, report: &StepReport) -> Result<(), Fault> {
        let batch = self.plan.batch(report.step);
        let due = batch.of_rank(rank, self.world());
        let expected = plan::without(due.clone(), &self.left_out.in_batch(&batch));
        if plan::joined(report.positions.iter().cloned()) == expected && report.epoch == batch.epoch {
            return Ok(());
        }
        Err(Fault::Positions {
            step: report.step,
            found: report.positions.clone(),
            found_epoch: report.epoch,
            due,
            due_epoch: batch.epoch,
        })
    }

    fn add(&mut self, rank: Rank, slot: Slot, report: &StepReport) -> Result<(), Fault> {
        let place = (report.step.0 - self.committed.0) as usize;
        if place == self.open.len() {
            self.open.push_back(OpenStep {
                witness: rank,
                totals: report.totals,
                memory_peak: MemoryPeak { slot, ..MemoryPeak::default() },
                skipped: report.skipped.clone(),
                ..OpenStep::default()
            });
        }
        let open = &mut self.open[place];
        if let Some((total, expected, found)) = open.totals.difference(&report.totals) {
            let witness = open.witness;
            return Err(Fault::Totals { step: report.step, total, found, witness, expected });
        }
        match (&mut open.skipped, &report.skipped) {
            (None, None) => {}
            (Some(ours), Some(theirs)) if ours.cause == theirs.cause => ours.merge(theirs),
            _ => return Err(Fault::LeftOut { step: report.step, witness: open.witness }),
        }
        open.reported += 1;
        open.times.add(&report.times);
        open.metrics.add(&report.metrics);
        open.tokens = open.tokens.saturating_add(report.tokens);
        open.retries = open.retries.max(report.retries);
        open.cache_generation = report.cache_generation;
        open.cache.add(&report.cache);
        if report.memory_peak > open.memory_peak.bytes {
            open.memory_peak = MemoryPeak { bytes: report.memory_peak, slot };
        }
        Ok(())
    }
}

/// Where features were taken from.
fn cached(number: &u64) -> String {
    match number {
        0 => "no cached features".into(),
        number => format!("version {number} of the cached features"),
    }
}
