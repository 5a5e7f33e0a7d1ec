//! Hangs: everybody heartbeats, and no step is committed.
//!
//! ```text
//! a step's time is known   overdue = last commit + 3 x expected time of a step + patience.standstill
//! connecting, first steps  overdue = last sign of motion + 3 x what came before it + patience.standstill (see `motion`)
//! ```
//!
//! The second rule needs somebody who waits: a rank that is alone has nobody to be compared with. A generation that is asked to end at
//! the next boundary is watched as any other, for it may not get there.
//!
//! A step has collectives, so one rank that stands still keeps all others waiting in one. The culprit is whoever is not in a collective;
//! if all are, whoever has entered the fewest. Phases that may last (checkpoint, evaluation, ...) excuse everybody, as a pause does.

use std::time::Duration;

use coxswain_proto::ids::{Seat, WorkerId};

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

/// A worker's phase and its last collectives.
pub(super) type Doing = (WorkerPhase, (u64, u64));

impl Machine {
    /// When the ranks must have got on, if they are expected to.
    pub(super) fn overdue_at(&self) -> Option<Timestamp> {
        let Phase::Running(running) = &self.phase else { return None };
        // Nobody has a step to do while a measurement of drift is waited for, which has its own deadline.
        if running.done() || self.waits_for_drift().is_some() {
            return None;
        }
        let patience = self.config.patience.standstill;
        Some(match self.expected_step() {
            Some(expected) => self.progress.at.after(expected * 3 + patience),
            None => self.motion.overdue_at(patience),
        })
    }

    /// How long a step takes, if one is being done and that is known.
    fn expected_step(&self) -> Option<Duration> {
        let Phase::Running(running) = &self.phase else { return None };
        running.training().and_then(|_| self.progress.pace.expected())
    }

    /// If a step is overdue, whoever holds it up is lost.
    pub(super) fn look_for_standstill(&mut self, now: Timestamp, out: &mut Vec<Action>) {
        if self.overdue_at().is_none_or(|at| at > now) {
            return;
        }
        let pace_is_known = self.expected_step().is_some();
        let since = match pace_is_known {
            true => now.since(self.progress.at),
            false => self.motion.quiet(now),
        };
        // Looked at again after as long, whatever comes of it.
        self.progress.at = now;
        self.motion.looked(now);
        let excused = |worker: &Worker| takes_long(worker.phase) || worker.phase == WorkerPhase::Paused;
        if self.orders.pause || self.members_now().any(excused) {
            return;
        }
        let furthest = self.members_now().map(|worker| worker.collective.0).max().unwrap_or(0);
        let others = self.members_now().filter(waiting).count();
        if !pace_is_known && others == 0 {
            return;
        }
        let culprit = self
            .members_now()
            .filter(|worker| !waiting(worker) || worker.collective.0 < furthest)
            .min_by_key(|worker| (waiting(worker), worker.collective.0));
        let Some(culprit) = culprit else { return self.nobody_gets_on(now, furthest, out) };
        let (seat, phase, step) = (culprit.seat(), culprit.phase, culprit.step);
        let what = if pace_is_known { "no step committed" } else { "nothing moved" };
        let message = format!(
            "it stands still: {phase} of step {step}, collective {} entered, {what} for {:.1} s, while {others} \
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

    /// A heartbeat has come, of a worker that did something else before.
    pub(super) fn has_moved(&mut self, now: Timestamp, id: WorkerId, before: Option<Doing>) {
        if before != self.doing(id) {
            self.motion.moved(now);
        }
    }

    /// What a worker was doing when last heard of.
    pub(super) fn doing(&mut self, id: WorkerId) -> Option<Doing> {
        self.roster.get_mut(id).ok().map(|worker| (worker.phase, worker.collective))
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

/// Whether a worker waits for the others: in a collective, or for its neighbours while the ring is formed.
fn waiting(worker: &&Worker) -> bool {
    match worker.phase {
        WorkerPhase::Communication => true,
        WorkerPhase::Connecting => worker.collective.0 > worker.collective.1,
        _ => false,
    }
}
