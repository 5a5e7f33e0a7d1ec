//! The only file that moves from one phase to another.

use std::sync::Arc;

use coxswain_proto::{
    ids::{Generation, Step},
    limits,
};

use super::{Machine, Timestamp};
use crate::{
    core::{
        action::{Action, Assignment, Directive, Record},
        failure::{Failure, Incident},
        news::News,
        phase::{Connecting, Course, End, Gathering, LastCall, Over, Phase, Running, Stage, Training},
        reason::Reason,
        status::Rhythm,
    },
    options::CauseKind,
};

impl Machine {
    /// The number of the generation that is being formed.
    pub(super) fn next_generation(&mut self) -> Generation {
        self.generation = Generation(self.generation.0 + 1);
        self.generation
    }

    /// Gathering to Connecting: everyone who must be there is ready.
    pub(super) fn connect(&mut self, assignment: Assignment, out: &mut Vec<Action>) -> Arc<Assignment> {
        let generation = assignment.generation;
        let members = assignment.members.iter().map(|member| (member.seat, member.worker)).collect();
        out.push(Action::Record(Record::Generation { generation, members }));
        let assignment = Arc::new(assignment);
        let earlier = match &mut self.phase {
            Phase::Gathering(gathering) => gathering.earlier.take(),
            Phase::Running(_) | Phase::Over(_) => None,
        };
        let workers = assignment.world();
        self.phase = Phase::Running(Box::new(Running {
            assignment: assignment.clone(),
            regroup: false,
            hand_over: false,
            stage: Stage::Connecting(Connecting { earlier, ..Connecting::default() }),
        }));
        self.say(Reason::Formed { generation, workers }, out);
        assignment
    }

    /// Connecting to Training: the ranks have agreed where to start.
    pub(super) fn train(&mut self, course: Course, first_step: Step) {
        if let Phase::Running(running) = &mut self.phase {
            running.stage = Stage::Training(Training { course, first_step, rhythm: Rhythm::default() });
        }
    }

    /// Running to Gathering: the generation is over, its workers get ready for the next.
    pub(super) fn break_up(&mut self, now: Timestamp, because: &str, abort: bool, out: &mut Vec<Action>) {
        let Phase::Running(running) = &mut self.phase else { return };
        let assignment = running.assignment.clone();
        let generation = assignment.generation;
        let fruitless = running.training().is_none_or(|at| at.course.ledger.committed() <= at.first_step);
        let standstill = self.config.patience.standstill + self.progress.pace.time_for(3).unwrap_or_default();
        let gathering = Gathering {
            settle_by: Some(now.after(standstill)),
            respawn_by: Some(now.after(self.config.patience.respawn)),
            last_call: LastCall::Over,
            relieved: running.hand_over && !abort,
            ..Gathering::new(now.after(self.config.patience.rendezvous))
        };
        self.gather(gathering, out);
        if abort {
            self.tell_members(&assignment, because, out);
        }
        self.say(Reason::Regathering { generation, because: because.to_owned() }, out);
        if let (true, Phase::Gathering(gathering)) = (fruitless, &mut self.phase) {
            gathering.fruitless = Some(because.to_owned());
        }
    }

    /// To Gathering. What may still be reported of the newest generation that has started goes along.
    pub(super) fn gather(&mut self, gathering: Gathering, out: &mut Vec<Action>) {
        let earlier = match std::mem::replace(&mut self.phase, Phase::Gathering(Box::new(gathering))) {
            Phase::Running(running) => {
                out.push(Action::Record(Record::Broken { generation: running.assignment.generation }));
                running.into_course()
            }
            Phase::Gathering(gathering) => gathering.earlier,
            Phase::Over(_) => None,
        };
        if let Phase::Gathering(gathering) = &mut self.phase {
            gathering.earlier = earlier;
        }
    }

    /// Asks the members to leave their generation at the next boundary, because the world is to change; after a checkpoint, if some of
    /// them are to go.
    pub(super) fn regroup(&mut self, now: Timestamp, hand_over: bool, out: &mut Vec<Action>) {
        let Phase::Running(running) = &mut self.phase else { return };
        (running.regroup, running.hand_over) = (true, hand_over);
        let assignment = running.assignment.clone();
        let incident = self.incident.get_or_insert_with(|| Incident::new(now));
        incident.on_purpose = true;
        self.spend(|spent| spent.rescales += 1, out);
        let lines = assignment.members.iter().filter_map(|member| self.roster.living_at(member.seat)?.line);
        let directive = Directive::Regroup { generation: assignment.generation, checkpoint: hand_over };
        out.extend(lines.map(|line| Action::Tell(line, directive.clone())));
    }

    /// To Over, for a failure that nothing can be done about.
    pub(super) fn fatal(&mut self, now: Timestamp, mut failure: Failure, out: &mut Vec<Action>) {
        if matches!(self.phase, Phase::Over(_)) {
            return out.push(Action::Publish(News::Consequence(Arc::new(failure))));
        }
        failure.fatal = true;
        if let Some(incident) = &self.incident {
            failure.victims.extend(&incident.victims);
        }
        self.end(now, End::Failed(Arc::new(failure)), out);
    }

    /// To Over.
    pub(super) fn end(&mut self, now: Timestamp, end: End, out: &mut Vec<Action>) {
        let reason = Reason::of_end(&end);
        let told = match &end {
            End::Failed(failure) => {
                out.push(Action::Publish(News::Failure(failure.clone(), self.spent.clone())));
                failure.to_string()
            }
            End::Finished(_) | End::Stopped(..) => reason.to_string(),
        };
        let directive = Directive::Abort { generation: self.generation, reason: told, over: true };
        self.tell_all(&directive, out);
        let deadline = now.after(self.config.patience.farewell);
        out.push(Action::Record(Record::Over(end.clone())));
        self.phase = Phase::Over(Over { end, deadline, expired: false });
        self.finish_all_refreshes(out);
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
                self.fatal(now, failure, out);
            }
            Phase::Gathering(gathering) => {
                let due = |at: Option<Timestamp>| at.is_some_and(|at| at <= now);
                let stragglers = due(gathering.settle_by);
                if due(gathering.respawn_by) {
                    gathering.respawn_by = None;
                }
                if matches!(gathering.last_call, LastCall::Open(until) if until <= now) {
                    gathering.last_call = LastCall::Over;
                }
                if stragglers {
                    self.look_for_stragglers(now, out);
                }
                self.try_form(now, out);
            }
            Phase::Over(over) if over.deadline <= now => over.expired = true,
            Phase::Running(_) | Phase::Over(_) => {}
        }
    }

    /// The membership as news tell it: 0 while the first one is forming.
    pub(super) fn generation_now(&self) -> Generation {
        match &self.phase {
            Phase::Gathering(gathering) if gathering.last_call != LastCall::Over => Generation(0),
            _ => self.generation,
        }
    }

    /// Tells the members that their generation is over.
    fn tell_members(&self, assignment: &Assignment, because: &str, out: &mut Vec<Action>) {
        let waiting = assignment.members.iter().filter_map(|member| self.roster.living_at(member.seat));
        // Those who are ready have left it already.
        let lines = waiting.filter(|worker| !worker.ready).filter_map(|worker| worker.line);
        out.extend(lines.map(|line| {
            let (generation, reason) = (assignment.generation, because.to_owned());
            Action::Tell(line, Directive::Abort { generation, reason, over: false })
        }));
    }

    /// False if one generation too many has ended without a committed step, which ends the run. Asked when the next one is formed,
    /// for only then it is known what ended the last one: a change on purpose is expected to cost a generation, and a sample that failed
    /// will be left out, or not fail elsewhere.
    pub(super) fn still_hopeful(&mut self, now: Timestamp, out: &mut Vec<Action>) -> bool {
        let Phase::Gathering(gathering) = &mut self.phase else { return true };
        let Some(because) = gathering.fruitless.take() else { return true };
        let expected = |incident: &Incident| incident.on_purpose || incident.sample.is_some();
        if self.incident.as_ref().is_some_and(expected) {
            return true;
        }
        // Faults that have nothing to do with each other are no loop: one comes back to the same worker, or has none to blame.
        let lost = self.incident.as_ref().map(|incident| incident.lost.clone()).unwrap_or_default();
        let again = lost.is_empty() || !lost.is_disjoint(&self.spent.barren_seats);
        let barren = if again { self.spent.barren + 1 } else { 1 };
        self.spend(|spent| (spent.barren, spent.barren_seats) = (barren, lost), out);
        if barren < limits::MAX_BARREN_GENERATIONS {
            return true;
        }
        let message = format!(
            "{barren} generations in a row ended without a committed step; the last one because {because}"
        );
        self.fatal(now, Failure::of_run(CauseKind::NoProgress, message), out);
        false
    }
}
