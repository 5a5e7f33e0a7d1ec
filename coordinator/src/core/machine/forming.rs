//! Who is in the next generation, and when it is formed.
//!
//! ```text
//! fixed     every seat has a worker that is ready
//! elastic   every seat of every node that is there; without the seats whose successors do not come in time, but with the fewest at
//!           least; when the run begins, more nodes than the fewest are waited for until the last call is over
//! ```
//!
//! A worker is ready when it has said so and its line is open: a generation never begins with the dead.

use coxswain_proto::ids::Seat;

use super::{Machine, Refusal, Reply, Timestamp};
use crate::{
    core::{
        action::{Action, Assignment, Directive, Member},
        event::Readiness,
        failure::Incident,
        phase::{LastCall, Phase},
        roster::Worker,
    },
    options::CauseKind,
};

impl Machine {
    /// A worker can take a place in the next generation; if it left one that was taken for alive, that one is broken.
    pub(super) fn ready(
        &mut self,
        now: Timestamp,
        ready: Readiness,
        out: &mut Vec<Action>,
    ) -> Result<Reply, Refusal> {
        if matches!(self.phase, Phase::Over(_)) {
            return Err(Refusal::Over(self.reason.clone()));
        }
        let worker = self.roster.living_mut(ready.worker)?;
        if worker.claim.incarnation != ready.incarnation {
            return Err(Refusal::UnknownWorker(ready.worker));
        }
        worker.last_seen = now;
        if ready.left < worker.generation {
            // Said before it was assigned, and heard again.
            return Ok(Reply::Done);
        }
        worker.ready = true;
        let seat = worker.seat();
        match &self.phase {
            Phase::Running(_) if self.is_member(seat) && self.result_is_safe() => {
                // Whoever has left in order was its neighbour, and that is all that it lost.
                self.end(now, self.end_in_order(), out);
            }
            Phase::Running(running) if running.rank_of(ready.worker).is_some() => {
                self.deserted(now, seat, &ready.reason, out);
            }
            Phase::Running(_) => self.widen(now, out),
            Phase::Gathering(_) if !ready.reason.is_empty() => self.complained(seat, &ready.reason),
            Phase::Gathering(_) | Phase::Over(_) => {}
        }
        self.dismiss(ready.worker, out);
        self.try_form(now, out);
        Ok(Reply::Done)
    }

    /// A member has left the generation by itself: its peers are gone for it, or all were asked to leave.
    fn deserted(&mut self, now: Timestamp, seat: Seat, reason: &str, out: &mut Vec<Action>) {
        // Nobody leaves without a reason but because all were asked to; a coordinator that was restarted may not know that it asked.
        let asked = reason.is_empty();
        let incident = self.incident.get_or_insert_with(|| Incident::new(now));
        incident.on_purpose |= asked;
        let because = if asked { incident.what() } else { format!("rank {seat}: {reason}") };
        if !asked {
            self.complained(seat, reason);
        }
        // Those that were asked leave at one boundary, each by itself.
        self.break_up(now, &because, !asked, out);
    }

    /// A worker suffers from a fault that somebody else may be to blame for.
    fn complained(&mut self, seat: Seat, reason: &str) {
        let complaint = self.failure_of(seat, CauseKind::PeerLost, reason.to_owned());
        let Some(incident) = &mut self.incident else { return };
        incident.victims.insert(seat);
        incident.complaint.get_or_insert(complaint);
    }

    /// Forms the next generation if those who must be there are.
    pub(super) fn try_form(&mut self, now: Timestamp, out: &mut Vec<Action>) {
        if !matches!(self.phase, Phase::Gathering(_)) {
            return;
        }
        let members = if self.config.world.elastic() { self.elastic_members(now) } else { self.all_seats() };
        let Some(members) = members else { return };
        if self.blame_victims(now, out) && self.still_hopeful(now, out) {
            self.form(&members, out);
            self.motion.begin(now);
            self.let_go(now, out);
        }
    }

    /// All seats, if each has a worker that can be assigned.
    fn all_seats(&self) -> Option<Vec<Seat>> {
        let seats = (0..self.roster.size()).map(Seat);
        seats.map(|seat| self.assignable(seat).then_some(seat)).collect()
    }

    /// The seats of those who are there, if nobody else is to be waited for.
    fn elastic_members(&mut self, now: Timestamp) -> Option<Vec<Seat>> {
        let world = self.config.world;
        let stays = |seat: &Seat| self.assignable(*seat) && !self.may_go(*seat);
        let ready: Vec<_> = (0..self.roster.size()).map(Seat).filter(stays).collect();
        let (full, enough) = (ready.len() == world.size() as usize, ready.len() >= world.least() as usize);
        let waits_for_more = !full && self.last_call(now, enough);
        // Whoever is still leaving the old generation has its part of the state.
        let leaving = self.roster.living().any(|worker| worker.generation.0 > 0 && !worker.ready);
        let missing = self.missing().next().is_some();
        let Phase::Gathering(gathering) = &self.phase else { return None };
        let waits_for_missing = missing && (gathering.respawn_by.is_some() || self.generation_is_first());
        let waits_for_leaving = leaving && gathering.settle_by.is_some();
        (enough && !waits_for_more && !waits_for_missing && !waits_for_leaving).then_some(ready)
    }

    /// Whether the run has only begun, and more nodes than the fewest are still waited for.
    fn last_call(&mut self, now: Timestamp, enough: bool) -> bool {
        let until = now.after(self.config.patience.last_call);
        let Phase::Gathering(gathering) = &mut self.phase else { return false };
        if gathering.last_call == LastCall::Closed && enough {
            gathering.last_call = LastCall::Open(until);
        }
        gathering.last_call != LastCall::Over
    }

    /// Seats of nodes that are there to stay, without a worker that can be assigned.
    fn missing(&self) -> impl Iterator<Item = Seat> {
        let world = self.config.world;
        let places = self.nodes.living().filter(|place| !self.orders.draining.contains(place));
        let seats = places.flat_map(move |place| world.seats_of(place));
        seats.filter(|seat| !self.assignable(*seat))
    }

    fn assignable(&self, seat: Seat) -> bool {
        self.roster.at(seat).is_some_and(|worker| worker.assignable())
    }

    /// No generation was formed before: nobody trains meanwhile, and nobody can be trained without.
    fn generation_is_first(&self) -> bool {
        matches!(&self.phase, Phase::Gathering(gathering) if gathering.last_call != LastCall::Over)
    }

    /// A worker is ready that is not in the generation that runs: the world grows, once all that came are ready.
    fn widen(&mut self, now: Timestamp, out: &mut Vec<Action>) {
        let Phase::Running(running) = &self.phase else { return };
        let outside = |worker: &&Worker| running.rank_of(worker.id).is_none() && !self.drained(worker.seat());
        let newcomers = || self.roster.living().filter(outside);
        let within_budget = self.config.budgets.rescales.is_none_or(|most| self.spent.rescales < most);
        let all_ready = newcomers().next().is_some() && newcomers().all(|worker| worker.ready);
        if running.regroup || running.done() || !within_budget || !all_ready {
            return;
        }
        self.regroup(now, false, out);
    }

    fn form(&mut self, seats: &[Seat], out: &mut Vec<Action>) {
        let generation = self.next_generation();
        let mut seats = seats.to_vec();
        self.quarantine.turn(&mut seats);
        let members: Vec<_> = seats
            .iter()
            .filter_map(|seat| self.roster.living_at(*seat))
            .map(|worker| Member {
                worker: worker.id,
                seat: worker.seat(),
                data_address: worker.claim.data_address.clone(),
                host: worker.claim.host.clone(),
            })
            .collect();
        let assignment =
            Assignment::new(generation, self.checkpoints.newest_complete(), members, &self.quarantine);
        for member in &assignment.members {
            if let Ok(worker) = self.roster.get_mut(member.worker) {
                (worker.generation, worker.ready) = (generation, false);
                // Collectives of an older one say nothing of this one.
                worker.collective = (0, 0);
            }
        }
        let assignment = self.connect(assignment, out);
        for worker in self.roster.living() {
            if let (Some(stream), Some(rank)) = (worker.line, assignment.rank_of(worker.id)) {
                out.push(Action::Tell(stream, Directive::Assignment(assignment.clone(), rank)));
            }
        }
    }
}
