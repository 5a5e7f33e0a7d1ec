//! What workers report while a generation runs.

use coxswain_proto::ids::WorkerId;

use super::{Machine, Refusal, Reply, Timestamp};
use crate::{
    core::{
        action::{Action, Directive, News, Record},
        checkpoints::EntryState,
        event::{Beat, CheckpointReport},
        failure::Failure,
        ledger::Fault,
        phase::Phase,
        reason::Reason,
        report::{PhasePeak, StepReport, WorkerPhase},
    },
    options::CauseKind,
};

impl Machine {
    pub(super) fn heartbeat(&mut self, now: Timestamp, beat: &Beat, out: &mut Vec<Action>) -> bool {
        let known = self.roster.heard(now, beat);
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
        let worker = self.roster.get_mut(id)?;
        worker.last_seen = now;
        let rank = worker.claim.rank;
        if let Some(newest) = reports.last() {
            worker.times = newest.times;
            worker.step = worker.step.max(newest.step);
        }
        for report in &reports {
            let Phase::Running(running) = &mut self.phase else { break };
            let end = running.leases.end();
            if let Err(fault) = running.ledger.report(rank, report, end) {
                let failure = self.disagreement(id, report, &fault);
                self.fail(now, failure, out);
            }
        }
        self.commit(out);
        Ok(Reply::Committed(self.progress.committed))
    }

    pub(super) fn memory(
        &mut self,
        now: Timestamp,
        id: WorkerId,
        peaks: &[PhasePeak],
        out: &mut Vec<Action>,
    ) -> Result<Reply, Refusal> {
        let worker = self.roster.get_mut(id)?;
        worker.last_seen = now;
        let rank = worker.claim.rank;
        self.memory.take(rank, peaks);
        for refresh in &mut self.refreshes {
            refresh.missing.remove(&rank);
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
        let worker = self.roster.get_mut(id)?;
        worker.last_seen = now;
        let rank = worker.claim.rank;
        if let Some(entry) = self.checkpoints.take(rank, report) {
            if entry.state == EntryState::Complete {
                out.push(Action::Record(Record::Checkpoint(entry.clone())));
            }
            out.push(Action::Publish(News::Checkpoint(entry)));
        }
        Ok(Reply::Done)
    }

    pub(super) fn note(
        &mut self,
        id: WorkerId,
        sequence: u64,
        text: String,
        out: &mut Vec<Action>,
    ) -> Result<Reply, Refusal> {
        let worker = self.roster.get_mut(id)?;
        if sequence > worker.notes {
            worker.notes = sequence;
            out.push(Action::Publish(News::Note(worker.claim.rank, text)));
        }
        Ok(Reply::Done)
    }

    /// Commits every step that all ranks have reported, and prolongs the leases.
    fn commit(&mut self, out: &mut Vec<Action>) {
        let Phase::Running(running) = &mut self.phase else { return };
        let before = running.ledger.committed();
        while let Some(step) = running.ledger.commit() {
            self.progress.pace.take(&step);
            self.progress.last = Some(step.clone());
            out.push(Action::Record(Record::Step(step.clone())));
            out.push(Action::Publish(News::Step(step)));
        }
        let committed = running.ledger.committed();
        if committed == before {
            return;
        }
        self.progress.committed = committed;
        let done = running.ledger.done();
        if let Some(leases) = running.leases.prolong(committed) {
            for worker in self.roster.workers() {
                if let (Some(stream), Some(lease)) = (worker.line, leases.get(worker.claim.rank.0 as usize)) {
                    out.push(Action::Tell(stream, Directive::Lease(*lease)));
                }
            }
        }
        match self.reason {
            _ if done => self.say(Reason::StepsDone, out),
            Reason::Complete { .. } | Reason::Resumed => self.say(Reason::Committing, out),
            _ => {}
        }
    }

    /// Training to Paused, once every rank waits: for `resume`, or in a collective for those that do. A rank whose directive came
    /// a moment after the vote goes one step further and waits there.
    fn all_paused(&mut self, out: &mut Vec<Action>) {
        let paused = |phase| phase == WorkerPhase::Paused;
        let waits = |phase| paused(phase) || phase == WorkerPhase::Communication;
        let phases = || self.roster.workers().map(|worker| worker.phase);
        if phases().any(paused) && phases().all(waits) {
            self.say(Reason::AllWait, out);
        }
    }

    fn disagreement(&mut self, id: WorkerId, report: &StepReport, fault: &Fault) -> Failure {
        let kind = match fault {
            Fault::NotFinite { .. } => CauseKind::Numeric,
            _ => CauseKind::Disagreement,
        };
        let mut failure = Failure::of_run(kind, fault.to_string());
        if let Ok(worker) = self.roster.get_mut(id) {
            failure.rank = Some(worker.claim.rank);
            failure.host.clone_from(&worker.claim.host);
        }
        failure.generation = report.generation;
        failure.phase = WorkerPhase::Communication;
        failure.step = report.step;
        failure
    }
}
