//! Hangs: everybody heartbeats, and no step is committed.
//!
//! ```text
//! overdue = last commit + 3 x expected time of a step + patience.standstill
//! ```
//!
//! A step has collectives, so one rank that stands still keeps all others waiting in one. The culprit is whoever is not in a collective;
//! if all are, whoever has entered the fewest. Phases that may last (checkpoint, evaluation, ...) excuse everybody, as a pause does.

use coxswain_proto::ids::Seat;

use super::{Machine, Timestamp, losing::takes_long};
use crate::{
    core::{
        action::Action,
        failure::{Failure, Incident},
        phase::Phase,
        report::WorkerPhase,
        roster::Worker,
    },
    options::CauseKind,
};

impl Machine {
    /// When a step must have been committed, if one is expected.
    pub(super) fn overdue_at(&self) -> Option<Timestamp> {
        let Phase::Running(running) = &self.phase else { return None };
        let expected = self.progress.pace.expected()?;
        let training = running.training().is_some() && !running.done() && !running.regroup;
        // Nobody has a step to do while a measurement of drift is waited for, which has its own deadline.
        let training = training && self.waits_for_drift().is_none();
        training.then(|| self.progress.at.after(expected * 3 + self.config.patience.standstill))
    }

    /// If a step is overdue, whoever holds it up is lost.
    pub(super) fn look_for_standstill(&mut self, now: Timestamp, out: &mut Vec<Action>) {
        if self.overdue_at().is_none_or(|at| at > now) {
            return;
        }
        let since = now.since(self.progress.at);
        // Looked at again after as long, whatever comes of it.
        self.progress.at = now;
        let excused = |worker: &Worker| takes_long(worker.phase) || worker.phase == WorkerPhase::Paused;
        if self.orders.pause || self.members_now().any(excused) {
            return;
        }
        let waiting = |worker: &&Worker| worker.phase == WorkerPhase::Communication;
        let furthest = self.members_now().map(|worker| worker.collective.0).max().unwrap_or(0);
        let others = self.members_now().filter(waiting).count();
        let culprit = self
            .members_now()
            .filter(|worker| !waiting(worker) || worker.collective.0 < furthest)
            .min_by_key(|worker| (waiting(worker), worker.collective.0));
        let Some(culprit) = culprit else { return self.nobody_gets_on(now, furthest, out) };
        let (seat, phase, step) = (culprit.seat(), culprit.phase, culprit.step);
        let message = format!(
            "it stands still: {phase} of step {step}, collective {} entered, no step committed for {:.1} s, while {others} \
             ranks wait in collective {furthest}",
            culprit.collective.0,
            since.as_secs_f64(),
        );
        self.lose_silently(now, seat, message, out);
    }

    /// All ranks wait in the same collective: the network between them has lost something. They try again.
    fn nobody_gets_on(&mut self, now: Timestamp, collective: u64, out: &mut Vec<Action>) {
        let message = format!("all ranks wait in collective {collective}, and nothing moves");
        let incident = self.incident.get_or_insert_with(|| Incident::new(now));
        let mut complaint = Failure::of_run(CauseKind::PeerLost, message.clone());
        (complaint.generation, complaint.phase) = (self.generation, WorkerPhase::Communication);
        complaint.collective = collective;
        incident.complaint.get_or_insert(complaint);
        self.break_up(now, &message, true, out);
    }

    /// Members of the generation that are not gone.
    fn members_now(&self) -> impl Iterator<Item = &Worker> {
        let members = match &self.phase {
            Phase::Running(running) => running.assignment.members.as_slice(),
            Phase::Gathering(_) | Phase::Over(_) => &[],
        };
        let seats = members.iter().map(|member| member.seat);
        seats.filter_map(|seat: Seat| self.roster.living_at(seat))
    }
}
