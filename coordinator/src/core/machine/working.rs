//! What workers report while a generation runs.

use std::sync::Arc;

use coxswain_proto::ids::{Bytes, Seat, Step, WorkerId};

use super::{Machine, Refusal, Reply, Timestamp};
use crate::{
    core::{
        action::{Action, Record},
        event::{Beat, CheckpointReport},
        failure::Failure,
        ledger::{Due, Fault},
        memory::MemoryReport,
        news::News,
        reason::Reason,
        report::{CommittedStep, StepReport, WorkerPhase},
    },
    options::CauseKind,
};

impl Machine {
    pub(super) fn heartbeat(&mut self, now: Timestamp, beat: &Beat, out: &mut Vec<Action>) -> bool {
        let known = self.roster.heard(now, beat);
        if known {
            self.felt(beat, out);
        }
        if known && self.reason == Reason::Pausing {
            self.all_paused(out);
        }
        known
    }

    pub(super) fn steps(
        &mut self,
        now: Timestamp,
        id: WorkerId,
        reports: Vec<StepReport>,
        out: &mut Vec<Action>,
    ) -> Result<Reply, Refusal> {
        let worker = self.roster.living_mut(id)?;
        worker.last_seen = now;
        let seat = worker.seat();
        if let Some(newest) = reports.last() {
            worker.times = newest.times;
            worker.metrics = newest.metrics.clone();
            worker.step = newest.step;
        }
        for report in &reports {
            let Some(course) = self.phase.course_mut() else { break };
            let Some(rank) = course.ledger.rank_of(id) else { break };
            let cache_generation = self.cache.turns().turn(report.step).map_or(0, |turn| turn.number());
            let due = Due { lease_end: course.leases.end_of(rank), cache_generation };
            if let Err(fault) = course.ledger.report((rank, seat), report, due) {
                if matches!(fault, Fault::Gap { .. }) && self.config.life > 1 {
                    // An earlier life had heard what is missing; on its new line the worker says it again, and this, too.
                    break;
                }
                let failure = self.disagreement(seat, report, &fault);
                self.fatal(now, failure, out);
            }
        }
        self.commit(now, out);
        self.try_start(now, out);
        if let Some(rank) = self.phase.training_mut().and_then(|training| training.course.ledger.rank_of(id))
        {
            self.grant_to(now, rank, out);
        }
        Ok(Reply::Committed(self.progress.committed))
    }

    pub(super) fn memory(
        &mut self,
        now: Timestamp,
        id: WorkerId,
        report: MemoryReport,
        out: &mut Vec<Action>,
    ) -> Result<Reply, Refusal> {
        let worker = self.roster.living_mut(id)?;
        worker.last_seen = now;
        let seat = worker.seat();
        self.memory.take(seat, report);
        for refresh in &mut self.refreshes {
            refresh.missing.remove(&seat);
        }
        self.finish_refreshes(now, out);
        Ok(Reply::Done)
    }

    pub(super) fn checkpoint(
        &mut self,
        now: Timestamp,
        id: WorkerId,
        report: CheckpointReport,
        out: &mut Vec<Action>,
    ) -> Result<Reply, Refusal> {
        self.roster.living_mut(id)?.last_seen = now;
        if self.orders.checkpoint_due.is_some_and(|due| due <= report.step) {
            self.order(|orders| orders.checkpoint_due = None, out);
        }
        let entry = self.checkpoints.take(report);
        out.extend(entry.map(|entry| Action::Publish(News::Checkpoint(entry))));
        Ok(Reply::Done)
    }

    pub(super) fn note(
        &mut self,
        now: Timestamp,
        id: WorkerId,
        sequence: u64,
        text: String,
        out: &mut Vec<Action>,
    ) -> Result<Reply, Refusal> {
        let worker = self.roster.living_mut(id)?;
        worker.last_seen = now;
        if sequence > worker.notes {
            worker.notes = sequence;
            out.push(Action::Publish(News::Note(worker.seat(), text)));
        }
        Ok(Reply::Done)
    }

    /// Commits every step that all ranks have reported.
    fn commit(&mut self, now: Timestamp, out: &mut Vec<Action>) {
        let before = self.progress.committed;
        while let Some(step) = self.phase.course_mut().and_then(|course| course.ledger.commit()) {
            self.committed_step(&step, out);
        }
        let committed = self.progress.committed;
        if committed == before {
            return;
        }
        self.motion.begin(now);
        let Some(training) = self.phase.training_mut() else { return };
        let done = training.course.ledger.done();
        self.grant_dry(now, out);
        match self.reason {
            _ if done => self.say(Reason::StepsDone, out),
            Reason::Started { .. } | Reason::Recalled { .. } | Reason::Resumed => {
                self.say(Reason::Committing, out)
            }
            _ => {}
        }
    }

    /// Makes one step part of the run.
    pub(super) fn committed_step(&mut self, step: &Arc<CommittedStep>, out: &mut Vec<Action>) {
        self.progress.committed = Step(step.step.0 + 1);
        self.proven = true;
        out.push(Action::Record(Record::Step(step.clone())));
        if self.spent.barren > 0 {
            self.spend(|spent| (spent.barren, spent.barren_seats) = Default::default(), out);
        }
        if self.quarantine.consumed(step.epoch, &step.positions) {
            out.push(Action::Record(Record::Quarantine(self.quarantine.clone())));
        }
        self.note_turn(step, out);
        // Of a step that nobody could report there is nothing to show.
        if step.reports > 0 {
            self.progress.pace.take(step);
            if let Some(training) = self.phase.training_mut() {
                training.rhythm.take(step);
            }
            self.progress.last = Some(step.clone());
            out.push(Action::Publish(News::Step(step.clone())));
        }
    }

    /// Training to Paused, once every rank waits: for `resume`, or in a collective for those that do. A rank whose directive came
    /// a moment after the vote goes one step further and waits there.
    fn all_paused(&mut self, out: &mut Vec<Action>) {
        let paused = |phase| phase == WorkerPhase::Paused;
        let waits = |phase| paused(phase) || phase == WorkerPhase::Communication;
        let phases = || self.roster.living().map(|worker| worker.phase);
        if phases().any(paused) && phases().all(waits) {
            self.say(Reason::AllWait, out);
        }
    }

    fn disagreement(&self, seat: Seat, report: &StepReport, fault: &Fault) -> Failure {
        let kind = match fault {
            Fault::NotFinite { .. } => CauseKind::Numeric,
            _ => CauseKind::Disagreement,
        };
        let mut failure = self.failure_of(seat, kind, fault.to_string());
        failure.generation = report.generation;
        failure.phase = WorkerPhase::Communication;
        failure.step = report.step;
        (failure.collective, failure.memory_in_use) = (0, Bytes(0));
        failure
    }
}
