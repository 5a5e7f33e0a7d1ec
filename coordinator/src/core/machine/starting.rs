//! Where a generation starts: its ranks have agreed, and say the same.
//!
//! ```text
//! start t    committed c
//! t = c      nothing is lost
//! t > c      steps c..t were done by all ranks of the generation before, though a lost rank could not say so, or nobody could because
//!            it was lost in the last collective of a step: they are committed now, with what has been reported of them
//! t < c      steps t..c are lost with the state that held them; they are repeated, and people are told
//! ```

use coxswain_proto::ids::Step;

use super::{Machine, Refusal, Reply, Timestamp};
use crate::{
    core::{
        action::{Action, Record},
        cache::Reached,
        event::StartReport,
        failure::Failure,
        leases::LeaseWindow,
        ledger::StepLedger,
        news::{News, Recovery},
        phase::{Connecting, Course, Phase, Stage},
        reason::Reason,
        report::StateSource,
    },
    options::CauseKind,
};

impl Machine {
    pub(super) fn reported_start(
        &mut self,
        now: Timestamp,
        report: StartReport,
        out: &mut Vec<Action>,
    ) -> Result<Reply, Refusal> {
        let worker = self.roster.living_mut(report.worker)?;
        worker.last_seen = now;
        let seat = worker.seat();
        let stale = Refusal::Stale { theirs: report.generation, ours: self.generation };
        let Phase::Running(running) = &mut self.phase else { return Err(stale) };
        let Some(rank) = running.rank_of(report.worker) else { return Err(stale) };
        if running.assignment.generation != report.generation {
            return Err(stale);
        }
        let agreed = match &mut running.stage {
            Stage::Training(training) => training.first_step,
            Stage::Connecting(connecting) => {
                connecting.starts.insert(rank, (report.first_step, report.source));
                connecting.starts.values().next().map_or(report.first_step, |(first, _)| *first)
            }
        };
        if agreed != report.first_step {
            let message = format!(
                "starts generation {} at step {}, but another rank at step {agreed}",
                report.generation, report.first_step
            );
            let failure = self.failure_of(seat, CauseKind::Disagreement, message);
            self.fatal(now, failure, out);
            return Ok(Reply::Done);
        }
        self.try_start(now, out);
        Ok(Reply::Done)
    }

    /// Starts the generation, once what its state proves is covered by reports.
    pub(super) fn try_start(&mut self, now: Timestamp, out: &mut Vec<Action>) {
        let Phase::Running(running) = &mut self.phase else { return };
        let world = running.assignment.members.len();
        let Stage::Connecting(connecting) = &mut running.stage else { return };
        let Some((first, source)) = connecting.agreed() else { return };
        // Reports of the others may be on their way, unless they have spoken, too; to a coordinator that was lost, perhaps.
        let last = connecting.starts.len() == world || connecting.recalled;
        match self.settle(first, source, last, out) {
            Ok(true) => self.start(now, first, source, out),
            Ok(false) if !last => {}
            Ok(false) => {
                let committed = self.progress.committed;
                let message = format!(
                    "all ranks start at step {first}, but step {committed} is next, and what lies between was never leased"
                );
                self.fatal(now, Failure::of_run(CauseKind::Disagreement, message), out);
            }
            Err(message) => self.fatal(now, Failure::of_run(CauseKind::Disagreement, message), out),
        }
    }

    /// Commits what the state of a start at `first` proves; with `blind`, also steps of which nobody has a report. False if that does
    /// not suffice.
    fn settle(
        &mut self,
        first: Step,
        source: StateSource,
        blind: bool,
        out: &mut Vec<Action>,
    ) -> Result<bool, String> {
        let committed = self.progress.committed;
        let Some(plan) = self.plan else { return Ok(false) };
        if first.0 > plan.total_steps() {
            return Err(format!(
                "all ranks start at step {first}, but the run has {} steps",
                plan.total_steps()
            ));
        }
        if first <= committed {
            return Ok(true);
        }
        // A complete checkpoint of this step proves the steps before it, even if those who did them are gone with their reports.
        let saved = source == StateSource::Checkpoint && self.checkpoints.has(first);
        let turns = self.cache.turns();
        let cache_generation = |step| turns.turn(step).map_or(0, |turn| turn.number());
        let steps = match self.phase.course_mut() {
            Some(course) => {
                let leased = first <= course.leases.end();
                course.ledger.settle(first, saved || (blind && leased), cache_generation)
            }
            None if saved => {
                StepLedger::new(plan, self.generation, &[], committed).settle(first, true, cache_generation)
            }
            None => None,
        };
        let Some(steps) = steps else { return Ok(false) };
        for step in steps {
            self.committed_step(&step, out);
        }
        Ok(true)
    }

    fn start(&mut self, now: Timestamp, first_step: Step, source: StateSource, out: &mut Vec<Action>) {
        let left_out = self.left_out();
        let leased = self.phase.course().map_or(first_step, |course| course.leases.end());
        let (Phase::Running(running), Some(plan)) = (&mut self.phase, self.plan) else { return };
        let generation = running.assignment.generation;
        let members = running.assignment.workers();
        let ledger = StepLedger::new(plan, generation, &members, first_step).without(left_out);
        let total = Step(plan.total_steps());
        let leases = LeaseWindow::new(generation, members.len() as u32, first_step, total);
        let done = ledger.done();
        self.train(Course { ledger, leases }, first_step);
        out.push(Action::Record(Record::Started { generation, first_step, source }));
        if self.orders.checkpoint_due.is_some() {
            self.order(|orders| orders.checkpoint_due = None, out);
        }
        (self.drift_by, self.safe_since) = (None, None);
        self.motion.begin(now);
        let committed = std::mem::replace(&mut self.progress.committed, first_step);
        if first_step < committed {
            let reached = self.cache.reached(Reached { committed, leased: leased.max(committed) });
            out.push(Action::Record(Record::RolledBack(reached)));
            out.push(Action::Publish(News::RolledBack { from: committed, to: first_step }));
        }
        self.say(Reason::Started { generation, first_step, source }, out);
        self.grant_all(now, out);
        self.recovered(now, first_step, source, out);
        if done {
            self.say(Reason::StepsDone, out);
        } else if let Some(reason) = self.orders.stop.clone() {
            self.say(Reason::StopAsked(reason), out);
        } else if self.orders.pause {
            self.say(Reason::Pausing, out);
        }
    }

    /// The incident, if there was one, is over.
    fn recovered(&mut self, now: Timestamp, first_step: Step, source: StateSource, out: &mut Vec<Action>) {
        let Some(incident) = self.incident.take() else { return };
        let Phase::Running(running) = &self.phase else { return };
        self.survived = incident.cause.clone().map(|cause| {
            let mut cause = (*cause).clone();
            cause.victims.clone_from(&incident.victims);
            std::sync::Arc::new(cause)
        });
        if let Some(failure) = &self.survived {
            out.push(Action::Record(Record::Failure(failure.clone())));
        }
        out.push(Action::Publish(News::Recovered(Recovery {
            generation: running.assignment.generation,
            members: running.assignment.world(),
            world: self.config.world.size(),
            first_step,
            source,
            took: now.since(incident.since),
            what: incident.what(),
            spent: self.spent.clone(),
            max_restarts: self.config.budgets.restarts,
        })));
    }
}

impl Connecting {
    /// Where the ranks that have spoken start.
    fn agreed(&self) -> Option<(Step, StateSource)> {
        // Ranks may differ in where they had their part from; the dearest source says most.
        let (first, _) = self.starts.values().next()?;
        let source = self.starts.values().map(|(_, source)| *source).max()?;
        Some((*first, source))
    }
}
