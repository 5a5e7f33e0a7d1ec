//! The feature cache: what workers report of it, and what people ask.

use coxswain_proto::{
    cache_plan::{CacheReport, Decided},
    ids::{Step, WorkerId},
    run_spec::CacheMode,
};

use super::{Machine, Refusal, Reply, Timestamp};
use crate::core::{
    action::{Action, Record},
    news::{CacheNews, News},
    phase::Phase,
    report::CommittedStep,
    status::CacheStatus,
};

impl Machine {
    pub(super) fn cache_report(
        &mut self,
        now: Timestamp,
        id: WorkerId,
        report: CacheReport,
        out: &mut Vec<Action>,
    ) -> Result<Reply, Refusal> {
        self.roster.living_mut(id)?.last_seen = now;
        let number = report.generation;
        // Of a generation that nobody remembers there is nothing to say.
        let Some(changed) = self.cache.take(report) else { return Ok(Reply::Done) };
        let Some(entry) = self.cache.entry(number).cloned() else { return Ok(Reply::Done) };
        if changed.durable {
            out.push(Action::Record(Record::CacheGeneration(entry.clone())));
        }
        if let Some(drift) = changed.drift {
            out.push(Action::Publish(News::Cache(CacheNews::Drift(drift))));
        }
        // Decided at once, whatever the generation is doing: a coordinator that is restarted would not hear of it again. A generation whose
        // adapter is lost has no drift, and no use.
        let lost = self.waits_for_drift().filter(|_| entry.lost);
        if let Some(at) = changed.drift.map(|drift| drift.at).or(lost) {
            self.decide(now, at, out);
        }
        if changed.completed || changed.lost {
            out.push(Action::Publish(News::Cache(CacheNews::Reported(entry, changed))));
        }
        Ok(Reply::Done)
    }

    pub(super) fn rebuild_cache(&mut self, now: Timestamp, out: &mut Vec<Action>) -> Result<Reply, Refusal> {
        self.must_go_on()?;
        match self.cache.config().mode {
            CacheMode::Periodic => {}
            CacheMode::Off => return Err(Refusal::NoCache),
            CacheMode::Exact => return Err(Refusal::ExactCache),
        }
        let committed = self.progress.committed;
        let leased = self.phase.course().map_or(committed, |course| course.leases.end().max(committed));
        let total = Step(self.plan.ok_or(Refusal::NotPlanned)?.total_steps());
        let waited = self.waits_for_drift();
        let Some((decided, new)) = self.cache.ask(committed, leased, total) else {
            return Err(Refusal::NoCachedStep { leased });
        };
        if new {
            self.decided(now, &decided, waited, out);
        }
        Ok(Reply::Rebuild(decided))
    }

    /// Decides about a step's features, if that depends on a measurement of drift that has come.
    fn decide(&mut self, now: Timestamp, at: Step, out: &mut Vec<Action>) {
        let waited = self.waits_for_drift();
        if self.cache.turns().asks_for_drift(at)
            && let Some(decided) = self.cache.decide(at, false)
        {
            self.decided(now, &decided, waited, out);
        }
    }

    /// Makes a decision durable, and goes on if it is what everybody `waited` for.
    fn decided(&mut self, now: Timestamp, decided: &Decided, waited: Option<Step>, out: &mut Vec<Action>) {
        self.record_turn(decided, out);
        if waited == Some(decided.first) {
            self.drift_by = None;
            self.grant_dry(now, out);
        }
    }

    /// Makes a decision durable before anybody hears of it.
    pub(super) fn record_turn(&self, decided: &Decided, out: &mut Vec<Action>) {
        out.push(Action::Record(Record::CacheTurn(*decided)));
        let entry = self.cache.entry(decided.generation.number).filter(|_| decided.begins());
        out.extend(entry.map(|entry| Action::Record(Record::CacheGeneration(entry.clone()))));
        out.push(Action::Publish(News::Cache(CacheNews::Decided(*decided))));
    }

    /// A committed step took its features from somewhere; the next one may be of another phase.
    pub(super) fn note_turn(&mut self, step: &CommittedStep, out: &mut Vec<Action>) {
        self.cache.used(step.cache_generation, &step.cache);
        let next = Step(step.step.0 + 1);
        let turns = self.cache.turns();
        let live = turns.changes_at(next) && turns.turn(next).is_some_and(|turn| turn.number() == 0);
        if live && next.0 < step.total_steps {
            let kept = turns.before(next).map(|decided| decided.generation.number);
            out.push(Action::Publish(News::Cache(CacheNews::Live(next, kept))));
        }
    }

    /// What `status` shows of it; nothing if there is none.
    pub(in crate::core) fn cache_status(&self) -> Option<CacheStatus> {
        let (book, next) = (&self.cache, self.progress.committed);
        if book.config().mode == CacheMode::Off {
            return None;
        }
        let turns = book.turns();
        let drifts = book.drifts().map(|entry| {
            let then = turns.decided().find(|decided| decided.first == entry.at);
            (*entry, then.copied())
        });
        Some(CacheStatus {
            mode: book.config().mode,
            tap: book.config().tap.clone(),
            serving: turns.turn(next).map_or(0, |turn| turn.number()),
            turn_ends: Some(turns.end(next)).filter(|end| *end < Step(u64::MAX)),
            waits_at: self.waits_for_drift().filter(|_| !matches!(self.phase, Phase::Over(_))),
            generations: book.newest().map(|entry| (entry.clone(), book.state(entry, next))).collect(),
            drifts: drifts.collect(),
        })
    }
}
