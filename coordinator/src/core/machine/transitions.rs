//! The only file that changes the phase.

use std::sync::Arc;

use coxswain_proto::{
    ids::{Generation, Step},
    plan::Plan,
};

use super::{Machine, Timestamp};
use crate::core::{
    action::{Action, Directive, News, Record},
    failure::{Failure, Search, Verdict},
    leases::LeaseWindow,
    ledger::StepLedger,
    phase::{End, Over, Phase, Running, Searching},
    reason::Reason,
};

impl Machine {
    /// Gathering to Running: every rank is there.
    pub(super) fn start_generation(&mut self, plan: Plan, out: &mut Vec<Action>) {
        self.generation = Generation(self.generation.0 + 1);
        let (generation, world) = (self.generation, self.config.world.size());
        let first_step = self.progress.committed;
        let assignment = self.assignment();
        let mut leases = LeaseWindow::new(generation, world, first_step, Step(plan.total_steps()));
        let granted = leases.prolong(first_step);
        let ledger = StepLedger::new(plan, generation, world, first_step);
        let done = ledger.done();
        self.phase = Phase::Running(Box::new(Running { assignment: assignment.clone(), ledger, leases }));
        out.push(Action::Record(Record::Generation { generation, world, first_step }));
        self.say(Reason::Complete { generation, first_step }, out);
        for worker in self.roster.workers() {
            let Some(stream) = worker.line else { continue };
            let rank = worker.claim.rank;
            out.push(Action::Tell(stream, Directive::Assignment(assignment.clone(), rank)));
            if let Some(lease) = granted.as_ref().and_then(|leases| leases.get(rank.0 as usize)) {
                out.push(Action::Tell(stream, Directive::Lease(*lease)));
            }
        }
        if done {
            self.say(Reason::StepsDone, out);
        }
    }

    /// To Over if the failure names a cause, else to Searching. Everyone abandons the generation at once.
    pub(super) fn fail(&mut self, now: Timestamp, failure: Failure, out: &mut Vec<Action>) {
        let (mut search, deadline) = match &mut self.phase {
            Phase::Over(_) => return out.push(Action::Publish(News::Consequence(Arc::new(failure)))),
            Phase::Searching(searching) => (std::mem::take(&mut searching.search), searching.deadline),
            Phase::Gathering(_) | Phase::Running(_) => {
                self.tell_all(&Directive::Abort(self.generation, failure.to_string()), out);
                // Long enough for a silent rank to be missed.
                (Search::default(), now.after(self.config.patience.silence * 2))
            }
        };
        match search.weigh(failure) {
            Verdict::Cause(failure) => self.end(now, End::Failed(Arc::new(failure)), out),
            Verdict::Open => {
                self.phase = Phase::Searching(Searching { search, deadline });
                self.say(Reason::Searching, out);
            }
        }
    }

    /// To Over.
    pub(super) fn end(&mut self, now: Timestamp, end: End, out: &mut Vec<Action>) {
        let reason = match &end {
            End::Finished(steps) => Reason::AllLeft { steps: *steps },
            End::Stopped(_, reason) => Reason::StopAsked(reason.clone()),
            End::Failed(failure) => Reason::Failed(failure.first_cause()),
        };
        if let End::Failed(failure) = &end {
            out.push(Action::Publish(News::Failure(failure.clone())));
        }
        let deadline = now.after(self.config.patience.farewell);
        self.phase = Phase::Over(Over { end, deadline, expired: false });
        self.finish_all_refreshes(out);
        out.push(Action::Record(Record::Over { phase: self.run_phase(), reason: reason.to_string() }));
        self.say(reason, out);
        if !self.memory.is_empty() {
            out.push(Action::Publish(News::Memory(self.memory_table())));
        }
    }

    /// What is due because the phase has lasted long enough.
    pub(super) fn phase_deadline(&mut self, now: Timestamp, out: &mut Vec<Action>) {
        match &mut self.phase {
            Phase::Gathering(gathering) if gathering.deadline <= now => {
                let failure = self.rendezvous_failed();
                self.fail(now, failure, out);
            }
            Phase::Searching(searching) if searching.deadline <= now => {
                let failure = std::mem::take(&mut searching.search).give_up();
                self.end(now, End::Failed(Arc::new(failure)), out);
            }
            Phase::Over(over) if over.deadline <= now => over.expired = true,
            _ => {}
        }
    }

    /// The membership as news tell it: 0 while it is forming.
    pub(super) fn generation_now(&self) -> Generation {
        match self.phase {
            Phase::Gathering(_) => Generation(0),
            _ => self.generation,
        }
    }
}
