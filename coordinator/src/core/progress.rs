//! How far the run is: what is planned, committed and saved, what ranks have reported, and how far they may
//! go.
//!
//! ```text
//!  committed           end of the leases        the rest of the plan
//! ─────────┤ in flight ├ ─ ─ waits where it is not decided where features come from ─ ─
//! ```
//!
//! A [`Course`] is what one generation does of it. It outlives its generation, until the next one starts.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use coxswain_proto::{
    cache_plan::{CacheDecision, CacheReport},
    ids::{Generation, Rank, Slot, Step, WorkerId},
    order::{LeftOut, Order},
    plan::Plan,
    run_spec::Train,
};

use super::{
    action::{Action, Lease, Record},
    cache::{CacheBook, HighWaterMark},
    caching::FeatureCache,
    checkpoints::Checkpoints,
    config::Config,
    event::{DataSet, WorkerClaim},
    leases::LeaseWindow,
    ledger::{Due, Fault, StepLedger, UnreportedStep},
    news::News,
    past::{Past, PastGeneration},
    quarantine::Quarantine,
    refusal::{Refusal, Witness},
    report::{CommittedStep, Metric, StateSource, StepReport},
    status::{CacheStatus, Pace, Rhythm},
    stragglers::{Slowness, SlownessChange, Stragglers},
    time::Timestamp,
};

/// How far a run is; outlives the phases.
#[derive(Clone, Debug)]
pub struct Progress {
    train: Train,
    seed: u64,
    /// What all ranks agree on, and the rank that saw it first.
    dataset: Option<(DataSet, Witness)>,
    /// Steps, once a worker has told the size of the data set.
    pub plan: Option<Plan>,
    /// Steps below this one are committed.
    pub committed: Step,
    /// The step committed last of those that were learned from, in this life of the coordinator.
    pub last: Option<Arc<CommittedStep>>,
    /// The newest error on held-out samples, in this life of the coordinator.
    pub held_out: Vec<Metric>,
    /// Committed steps that were left out.
    pub skipped: BTreeSet<Step>,
    /// How fast it goes.
    pub pace: Pace,
    /// A step was committed in this launch: its run file, model and data can be used.
    pub proven: bool,
    /// Since when the results are known to be on disk, while not everybody has left the generation that runs.
    pub safe_since: Option<Timestamp>,
    /// Samples that failed.
    pub quarantine: Quarantine,
    /// Where features come from.
    pub cache: FeatureCache,
    /// What is on disk.
    pub checkpoints: Checkpoints,
    course: Option<Course>,
}

/// The steps of the newest generation that has started.
#[derive(Clone, Debug)]
pub struct Course {
    /// Steps.
    pub ledger: StepLedger,
    /// How far its ranks may go.
    pub leases: LeaseWindow,
    /// Where it started.
    pub first_step: Step,
    /// Which of its ranks are slow.
    stragglers: Stragglers,
    /// How long its steps take.
    rhythm: Rhythm,
    /// The generation has ended: its ranks may still report, and are granted nothing more.
    over: bool,
}

impl Course {
    /// Steps of a generation that starts at `first_step` now, or did in an earlier life of the coordinator.
    fn new(ledger: StepLedger, leases: LeaseWindow, first_step: Step) -> Self {
        let world = ledger.all_owed().count();
        let stragglers = Stragglers::new(ledger.generation(), world, ledger.committed());
        Self { ledger, leases, first_step, stragglers, rhythm: Rhythm::default(), over: false }
    }
}

impl Progress {
    /// A run that begins, or goes on where its earlier lives were.
    pub fn new(config: &Config, past: &Past) -> Self {
        let train = &config.train;
        let checkpoints = Checkpoints::found(config.checkpoints.iter().cloned(), train.keep_checkpoints)
            .saying(config.skipped.clone());
        let committed = past.committed.unwrap_or_else(|| checkpoints.newest_complete());
        let plan = past.dataset.as_ref().and_then(|dataset| Plan::new(train, dataset.training_samples).ok());
        let (cache_phases, caches) = (past.cache_phases.values(), past.caches.values());
        let mut book = CacheBook::new(&config.cache, plan.as_ref(), cache_phases, caches, past.reached);
        if let Some(plan) = plan.filter(|_| past.started().is_some()) {
            let leased = book.leased_at_most(committed, Step(plan.total_steps()));
            book.reached(HighWaterMark { committed, leased });
        }
        Self {
            train: train.clone(),
            seed: config.seed,
            dataset: past.dataset.clone().map(|dataset| (dataset, Witness::Journal)),
            plan,
            committed,
            last: None,
            held_out: Vec::new(),
            skipped: past.skipped.clone(),
            pace: Pace::default(),
            proven: config.restarted && past.has_trained(),
            safe_since: None,
            quarantine: past.quarantine.clone(),
            cache: FeatureCache::new(book, config.patience.drift),
            checkpoints,
            course: None,
        }
    }

    /// Takes over the steps of a generation that had started. Reports in flight are said again; what is
    /// leased reaches no further than a window.
    pub fn recall(&mut self, plan: Plan, generation: Generation, past: &PastGeneration) {
        let Some((first_step, _)) = past.started else { return };
        let members: Vec<_> = past.members.iter().map(|(_, worker)| *worker).collect();
        let total = Step(plan.total_steps());
        let mut leases = LeaseWindow::new(generation, members.len() as u32, self.committed, total);
        leases.extend(self.cache.book.leased_at_most(self.committed, total));
        leases.assume_all_held();
        let ledger = StepLedger::new(plan, generation, &members, self.committed).without(self.left_out());
        self.course = Some(Course::new(ledger, leases, first_step));
    }

    /// The steps of the run as a worker's data set has them, which is the one that all others see.
    pub fn plan_for(&self, claim: &WorkerClaim) -> Result<Plan, Refusal> {
        match &self.dataset {
            Some((ours, witness)) if *ours != claim.dataset => Err(Refusal::OtherDataSet {
                slot: claim.slot,
                theirs: Box::new(claim.dataset.clone()),
                witness: witness.clone(),
                ours: Box::new(ours.clone()),
            }),
            _ => Ok(Plan::new(&self.train, claim.dataset.training_samples)?),
        }
    }

    /// A worker with this plan is in: if it is the first one, its data set is the run's.
    pub fn planned(&mut self, plan: Plan, claim: &WorkerClaim, out: &mut Vec<Action>) {
        if self.dataset.is_none() {
            out.push(Action::Record(Record::DataSet(claim.dataset.clone())));
            let witness = Witness::Slot(claim.slot, claim.host.clone());
            self.dataset = Some((claim.dataset.clone(), witness));
        }
        self.plan = Some(plan);
        self.cache.book.planned(&plan);
    }

    /// The steps that workers may still report: of the generation that trains, or of the one before until the
    /// next has started.
    pub fn course(&self) -> Option<&Course> {
        self.course.as_ref()
    }

    /// The steps that are being done.
    pub fn training(&self) -> Option<&Course> {
        self.course().filter(|course| !course.over)
    }

    /// Every step is committed, of a generation that runs or has just ended.
    pub fn done(&self) -> bool {
        self.course().is_some_and(|course| course.ledger.done())
    }

    /// A member of the generation that runs has left in order: none does before the results are on disk, so
    /// a loss changes nothing any more.
    pub fn result_is_safe(&self) -> bool {
        self.safe_since.is_some()
    }

    /// A worker's position in the generation that trains.
    pub fn rank_of(&self, worker: WorkerId) -> Option<Rank> {
        self.training()?.ledger.rank_of(worker)
    }

    /// A generation starts. What that rolls back, if it does: how far the run has ever been, which is to be
    /// made durable.
    pub fn start(
        &mut self,
        generation: Generation,
        members: &[WorkerId],
        first_step: Step,
    ) -> Option<HighWaterMark> {
        let plan = self.plan?;
        let leased = self.course().map_or(first_step, |course| course.leases.end());
        let ledger = StepLedger::new(plan, generation, members, first_step).without(self.left_out());
        let total = Step(plan.total_steps());
        let leases = LeaseWindow::new(generation, members.len() as u32, first_step, total);
        self.course = Some(Course::new(ledger, leases, first_step));
        self.cache.go_on();
        let committed = std::mem::replace(&mut self.committed, first_step);
        self.skipped.split_off(&first_step);
        let leased = leased.max(committed);
        (first_step < committed).then(|| self.cache.book.reached(HighWaterMark { committed, leased }))
    }

    /// The generation that runs has ended.
    pub fn interrupt(&mut self) {
        self.safe_since = None;
        if let Some(course) = &mut self.course {
            course.over = true;
        }
    }

    /// The run is over: nothing that is reported counts any more.
    pub fn close(&mut self) {
        self.course = None;
    }

    /// Takes in what a worker reports of steps, up to the first report that cannot be true. Ranks that have
    /// become slow by it, or are well again.
    pub fn accept_reports(
        &mut self,
        id: WorkerId,
        slot: Slot,
        reports: &[StepReport],
    ) -> Result<Vec<SlownessChange>, Box<(StepReport, Fault)>> {
        let mut changes = Vec::new();
        let Some(course) = &mut self.course else { return Ok(changes) };
        let Some(rank) = course.ledger.rank_of(id) else { return Ok(changes) };
        for report in reports {
            let cache_generation = self.cache.serving(report.step);
            let due = Due { lease_end: course.leases.end_of(rank), cache_generation };
            let taken = course.ledger.record_report(rank, slot, report, due);
            taken.map_err(|fault| Box::new((report.clone(), fault)))?;
            changes.extend(course.stragglers.observe(rank, report));
        }
        Ok(changes)
    }

    /// How slow a worker is in the generation that trains, if it is.
    pub fn slow(&self, worker: WorkerId) -> Option<Slowness> {
        self.training()?.stragglers.slow(self.rank_of(worker)?)
    }

    /// The rank of the generation that trains that has been slow for so many windows, and longest.
    pub fn overdue(&self, windows: u64) -> Option<SlownessChange> {
        self.training()?.stragglers.overdue(windows)
    }

    /// Commits every step that all ranks have reported; false if there is none.
    pub fn commit(&mut self, out: &mut Vec<Action>) -> bool {
        let before = self.committed;
        while let Some(step) = self.course.as_mut().and_then(|course| course.ledger.commit()) {
            self.commit_step(&step, out);
        }
        self.committed > before
    }

    /// Commits what the state of a start at `first` proves; with `blind`, also steps that no rank has
    /// reported. False if that does not suffice.
    pub fn settle(
        &mut self,
        generation: Generation,
        first: Step,
        source: StateSource,
        blind: bool,
        out: &mut Vec<Action>,
    ) -> Result<bool, String> {
        let committed = self.committed;
        let Some(plan) = self.plan else { return Ok(false) };
        if first.0 > plan.total_steps() {
            return Err(format!(
                "all ranks start at step {first}, but the run ends at step {}",
                plan.total_steps()
            ));
        }
        if first <= committed {
            return Ok(true);
        }
        // A complete checkpoint of this step proves the steps before it, even if the ranks that did them are
        // gone with their reports.
        let saved = source == StateSource::Checkpoint && self.checkpoints.has(first);
        let unseen = |step| UnreportedStep {
            found_by: saved.then_some(generation),
            cache_generation: self.cache.serving(step),
            skipped: self.checkpoints.skipped(step).cloned(),
        };
        let steps = match &mut self.course {
            Some(Course { ledger, leases, .. }) => {
                ledger.settle(first, saved || (blind && first <= leases.end()), unseen)
            }
            None if saved => StepLedger::new(plan, generation, &[], committed).settle(first, true, unseen),
            None => None,
        };
        let Some(steps) = steps else { return Ok(false) };
        steps.iter().for_each(|step| self.commit_step(step, out));
        Ok(true)
    }

    /// A rank that leaves in order has come to the end, and so have all others: the last step has
    /// collectives. What its peers could not report of the last steps, because they are lost or cut off, is
    /// committed from its own reports.
    pub fn settle_all(&mut self, id: WorkerId, out: &mut Vec<Action>) {
        let (Some(plan), Some(Course { ledger, .. })) = (self.plan, &mut self.course) else { return };
        if ledger.rank_of(id).is_none_or(|rank| !ledger.has_reported_all(rank)) {
            return;
        }
        // Nothing is committed blindly: its reports cover every step that is left.
        let steps =
            ledger.settle(Step(plan.total_steps()), false, |_| UnreportedStep::default()).unwrap_or_default();
        steps.iter().for_each(|step| self.commit_step(step, out));
    }

    /// Makes one step part of the run.
    fn commit_step(&mut self, step: &Arc<CommittedStep>, out: &mut Vec<Action>) {
        self.committed = Step(step.step.0 + 1);
        self.proven = true;
        out.push(Action::Record(Record::Step(step.clone())));
        if self.quarantine.consumed(step.consumed.epoch, &step.consumed.positions) {
            out.push(Action::Record(Record::Quarantine(self.quarantine.clone())));
        }
        self.cache.used(step, out);
        if step.skipped.is_some() {
            self.skipped.insert(step.step);
        }
        // A step that no rank could report has nothing to show.
        if step.reports == 0 {
            return;
        }
        if step.metrics.iter().any(Metric::is_held_out) {
            self.held_out = step.metrics.iter().filter(|metric| metric.is_held_out()).cloned().collect();
        }
        // One that was left out has taken two attempts, or none, and has no figures.
        if step.skipped.is_none() {
            self.pace.add_step(step);
            if let Some(course) = &mut self.course {
                course.rhythm.add_step(step);
            }
            self.last = Some(step.clone());
        }
        out.push(Action::Publish(News::Step(step.clone())));
    }

    /// How long the next step takes, if that is known of its kind in the generation that trains.
    pub fn expected_step(&self) -> Option<Duration> {
        let cache_phase = self.cache.book.cache_phases().cache_phase(self.committed)?;
        let course = self.training().filter(|course| !course.ledger.done())?;
        course.rhythm.expected(cache_phase.number() > 0)
    }

    /// Every rank of the generation that trains.
    pub fn all_ranks(&self) -> Vec<Rank> {
        let world = self.training().map_or(0, |course| course.ledger.all_owed().count() as u32);
        (0..world).map(Rank).collect()
    }

    /// The ranks that have nothing left to run, and nothing to report that would remind us of them.
    pub fn dry_ranks(&self) -> Vec<Rank> {
        self.training().map_or_else(Vec::new, |course| course.leases.dry(course.ledger.all_owed()))
    }

    /// A rank that has reported, if it is due.
    pub fn due_rank(&self, worker: WorkerId) -> Option<Rank> {
        let (rank, leases) = (self.rank_of(worker)?, &self.training()?.leases);
        leases.due(rank, self.committed).then_some(rank)
    }

    /// Moves the end of the window to where it should be, and decides about cache phases on the way: how far
    /// ranks may go is never further than it is decided where features come from.
    pub fn prolong(&mut self, now: Timestamp, out: &mut Vec<Action>) {
        let (committed, cache) = (self.committed, &mut self.cache);
        let Some(Course { leases, .. }) = self.course.as_mut().filter(|course| !course.over) else { return };
        let steps = leases.end()..leases.target(committed);
        leases.extend(cache.decide_over(now, committed, steps, out));
    }

    /// Grants a rank the rest of the window.
    pub fn grant(&mut self, rank: Rank) -> Vec<Lease> {
        let book = &self.cache.book;
        let course = self.course.as_mut().filter(|course| !course.over);
        course.map_or_else(Vec::new, |course| course.leases.grant(rank, |step| book.lease_cache_phase(step)))
    }

    /// What a rank holds, for a line that was opened again.
    pub fn held_by(&mut self, rank: Rank) -> Vec<Lease> {
        let (book, committed) = (&self.cache.book, self.committed);
        let course = self.course.as_mut().filter(|course| !course.over);
        let held =
            |course: &mut Course| course.leases.replay(rank, committed, |step| book.lease_cache_phase(step));
        course.map_or_else(Vec::new, held)
    }

    /// The first step that a worker may not run now.
    pub fn lease_end(&self, worker: WorkerId) -> Step {
        let held = |rank| Some(self.training()?.leases.end_of(rank));
        self.rank_of(worker).and_then(held).unwrap_or_default().max(self.committed)
    }

    /// The step that no lease reaches because it is not decided where its features come from.
    pub fn waits_for_drift(&self) -> Option<Step> {
        let (end, total) = (self.training()?.leases.end(), self.plan?.total_steps());
        (end.0 < total && self.cache.is_undecided(end)).then_some(end)
    }

    /// When the measurement is given up that all ranks wait for: none waits while there are steps to do
    /// before it.
    pub fn drift_deadline(&self) -> Option<Timestamp> {
        self.cache.drift_by().filter(|_| self.waits_for_drift() == Some(self.committed))
    }

    /// A worker knows something of the feature cache; true if those that waited for it can go on.
    pub fn cache_report(&mut self, report: CacheReport, out: &mut Vec<Action>) -> bool {
        let waited = self.waits_for_drift();
        self.cache.accept_report(report, waited, out)
    }

    /// A new generation of the cache is asked for. What was decided, and whether those that waited can
    /// go on.
    pub fn rebuild_cache(&mut self, out: &mut Vec<Action>) -> Result<(CacheDecision, bool), Refusal> {
        self.cache.can_be_rebuilt()?;
        let committed = self.committed;
        let leased = self.course().map_or(committed, |course| course.leases.end().max(committed));
        let total = Step(self.plan.ok_or(Refusal::NotPlanned)?.total_steps());
        let waited = self.waits_for_drift();
        self.cache.rebuild(HighWaterMark { committed, leased }, total, waited, out)
    }

    /// What `status` shows of the feature cache.
    pub fn cache_status(&self) -> Option<CacheStatus> {
        self.cache.status(self.committed, self.waits_for_drift())
    }

    /// Positions that are left out, in this run's order.
    fn left_out(&self) -> LeftOut {
        self.order().map(|order| self.quarantine.positions(order)).unwrap_or_default()
    }

    /// The order of this run's samples, once a worker has opened them.
    pub fn order(&self) -> Option<Order> {
        self.dataset.as_ref().map(|(dataset, _)| dataset.order(self.seed))
    }
}
