//! The feature cache as a run uses it: what is decided about steps, what people hear of it, and how long a
//! measurement of drift is waited for.

use std::{ops::Range, time::Duration};

use coxswain_proto::{
    cache_plan::{CacheDecision, CacheReport},
    ids::Step,
    run_spec::CacheMode,
};

use super::{
    action::{Action, Record},
    cache::{CacheBook, CacheChange, HighWaterMark},
    news::{CacheNews, News},
    refusal::Refusal,
    report::CommittedStep,
    status::CacheStatus,
    time::Timestamp,
};

/// The feature cache of a run.
#[derive(Clone, Debug)]
pub struct FeatureCache {
    /// What is known and decided.
    pub book: CacheBook,
    /// When a measurement of drift that everybody waits for is given up.
    drift_by: Option<Timestamp>,
    /// How long the coordinator waits for it while no rank measures.
    patience: Duration,
}

impl FeatureCache {
    /// Nothing is waited for.
    pub fn new(book: CacheBook, patience: Duration) -> Self {
        Self { book, drift_by: None, patience }
    }

    /// When the measurement is given up, if one is waited for.
    pub fn drift_by(&self) -> Option<Timestamp> {
        self.drift_by
    }

    /// A measurement is waited for from now on, unless one was before.
    pub fn wait_for_drift(&mut self, now: Timestamp) {
        self.drift_by.get_or_insert(now.after(self.patience));
    }

    /// A rank measures, or none can: the time begins again.
    pub fn wait_longer(&mut self, now: Timestamp) {
        self.drift_by = Some(now.after(self.patience));
    }

    /// Nothing is waited for any more.
    pub fn go_on(&mut self) {
        self.drift_by = None;
    }

    /// The generation that serves a step; 0 for none.
    pub fn serving(&self, step: Step) -> u64 {
        self.book.cache_phases().cache_phase(step).map_or(0, |cache_phase| cache_phase.number())
    }

    /// Whether it is not decided yet where a step takes its features from.
    pub fn is_undecided(&self, step: Step) -> bool {
        self.book.cache_phases().cache_phase(step).is_none()
    }

    /// How far leases may reach that are to be prolonged by these steps: decides about cache phases on the
    /// way, and stops where a drift must be waited for. Steps below `committed` are.
    pub fn decide_over(
        &mut self,
        now: Timestamp,
        committed: Step,
        steps: Range<Step>,
        out: &mut Vec<Action>,
    ) -> Step {
        let Range { start: end, end: target } = steps;
        let overdue = self.drift_by.is_some_and(|by| by <= now);
        while let Some(at) = self.book.cache_phases().undecided(end, target) {
            let Some(decided) = self.book.decide(at, overdue && at == end) else {
                if committed == at {
                    self.wait_for_drift(now);
                }
                return at;
            };
            self.record(&decided, out);
            if end == at {
                // Everybody has waited for this, and not stood still.
                self.go_on();
            }
        }
        target
    }

    /// Takes a report in, and decides at once if something depended on it: a coordinator that is restarted
    /// would not hear of it again. `waited` is the step that everybody waits at; true if they can go on.
    pub fn accept_report(
        &mut self,
        report: CacheReport,
        waited: Option<Step>,
        out: &mut Vec<Action>,
    ) -> bool {
        let number = report.generation;
        // A generation that was forgotten is not reported.
        let Some(changed) = self.book.apply_report(report) else { return false };
        let Some(entry) = self.book.entry(number).cloned() else { return false };
        let CacheChange { durable, completed, lost, drift } = changed;
        if durable {
            out.push(Action::Record(Record::CacheGeneration(Box::new(entry.clone()))));
        }
        if let Some(drift) = drift {
            out.push(Action::Publish(News::Cache(CacheNews::Drift(drift))));
        }
        // A generation whose adapter is lost has no drift, and no use.
        let at = drift.map(|drift| drift.at).or(waited.filter(|_| entry.lost));
        let at = at.filter(|at| self.book.cache_phases().asks_for_drift(*at));
        let decided = at.and_then(|at| self.book.decide(at, false));
        let goes_on = decided.is_some_and(|decided| self.decided(&decided, waited, out));
        if completed || lost {
            out.push(Action::Publish(News::Cache(CacheNews::Reported(entry, changed))));
        }
        goes_on
    }

    /// Whether there is a cache whose features go stale.
    pub fn can_be_rebuilt(&self) -> Result<(), Refusal> {
        match self.book.config().mode {
            CacheMode::Periodic => Ok(()),
            CacheMode::Off => Err(Refusal::NoCache),
            CacheMode::Exact => Err(Refusal::ExactCache),
        }
    }

    /// A new generation is asked for in a run of `total` steps that has come so far. What was decided,
    /// and whether those that `waited` can go on.
    pub fn rebuild(
        &mut self,
        reached: HighWaterMark,
        total: Step,
        waited: Option<Step>,
        out: &mut Vec<Action>,
    ) -> Result<(CacheDecision, bool), Refusal> {
        let HighWaterMark { committed, leased } = reached;
        let asked = self.book.ask(committed, leased, total);
        let (decided, new) = asked.ok_or(Refusal::NoCachedStep { leased })?;
        Ok((decided, new && self.decided(&decided, waited, out)))
    }

    /// A committed step took its features from somewhere; the next one may be of another phase.
    pub fn used(&mut self, step: &CommittedStep, out: &mut Vec<Action>) {
        self.book.used(step.cache_generation, &step.cache);
        let next = Step(step.step.0 + 1);
        let cache_phases = self.book.cache_phases();
        let live = cache_phases.changes_at(next)
            && cache_phases.cache_phase(next).is_some_and(|cache_phase| cache_phase.number() == 0);
        if live && next.0 < step.total_steps {
            let kept = cache_phases.before(next).map(|decided| decided.generation.number);
            out.push(Action::Publish(News::Cache(CacheNews::Live(next, kept))));
        }
    }

    /// What `status` shows of it when `next` is the next step; nothing if there is none.
    pub fn status(&self, next: Step, waits_at: Option<Step>) -> Option<CacheStatus> {
        let (book, cache_phases) = (&self.book, self.book.cache_phases());
        if book.config().mode == CacheMode::Off {
            return None;
        }
        let drifts = book.drifts().map(|entry| {
            let then = cache_phases.decided().find(|decided| decided.first == entry.at);
            (*entry, then.copied())
        });
        Some(CacheStatus {
            mode: book.config().mode,
            tap: book.config().tap.clone(),
            serving: self.serving(next),
            cache_phase_ends: Some(cache_phases.end(next)).filter(|end| *end < Step(u64::MAX)),
            waits_at,
            generations: book.newest().map(|entry| (entry.clone(), book.state(entry, next))).collect(),
            drifts: drifts.collect(),
        })
    }

    /// Makes a decision durable; true if it is what everybody waited for.
    fn decided(&mut self, decided: &CacheDecision, waited: Option<Step>, out: &mut Vec<Action>) -> bool {
        self.record(decided, out);
        let goes_on = waited == Some(decided.first);
        if goes_on {
            self.go_on();
        }
        goes_on
    }

    /// Makes a decision durable before it is sent to a worker.
    fn record(&self, decided: &CacheDecision, out: &mut Vec<Action>) {
        out.push(Action::Record(Record::CachePhase(*decided)));
        let entry = self.book.entry(decided.generation.number).filter(|_| decided.begins());
        out.extend(entry.map(|entry| Action::Record(Record::CacheGeneration(Box::new(entry.clone())))));
        out.push(Action::Publish(News::Cache(CacheNews::Decided(*decided))));
    }
}
