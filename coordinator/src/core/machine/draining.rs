//! Nodes of an elastic world that are to go, because somebody says so or their machine is taken away: they leave at a step boundary,
//! and the rest trains on without a step lost.
//!
//! ```text
//! asked ─▶ Regroup with a checkpoint ─▶ all members leave at one boundary ─▶ Dismiss to those who go ─▶ they leave
//!                                                                       └──▶ the others form the next generation
//! ```
//!
//! Mirrors alone would not do: neighbours on one node hold each other's. So the checkpoint of that boundary is there whatever happens.
//! Nobody is let go in the middle of a recovery: whoever holds a part of the state is a member of the next generation first. A node
//! stays marked until another launcher takes its place, or its own is gone. Losing a worker of such a node costs no restart, and nobody is
//! asked to come back.

use std::sync::Arc;

use coxswain_proto::ids::{Seat, WorkerId};

use super::{Machine, Refusal, Reply, Timestamp};
use crate::core::{
    action::{Action, Directive, Record},
    event::NodeName,
    failure::{Failure, Incident},
    news::{MemberChange, News},
    phase::Phase,
};

impl Machine {
    /// A node is to go.
    pub(super) fn drain(
        &mut self,
        now: Timestamp,
        node: NodeName,
        reason: String,
        out: &mut Vec<Action>,
    ) -> Result<Reply, Refusal> {
        self.must_go_on()?;
        let place = match node {
            NodeName::Place(place) => place,
            NodeName::Launcher(node_id) => self.nodes.find(&node_id)?.0,
        };
        let node = self.nodes.at(place).filter(|node| !node.gone).ok_or(Refusal::NoNodeThere(place))?;
        let (node_rank, host) = (place, node.host.clone());
        if self.orders.draining.contains(&place) {
            return Ok(Reply::Drained(place));
        }
        self.can_do_without(place)?;
        self.order(|orders| orders.draining.extend([place]), out);
        self.announce(MemberChange::NodeDrained { node_rank, host, reason }, out);
        for worker in self.config.world.seats_of(place).filter_map(|seat| self.roster.living_at(seat)) {
            self.dismiss(worker.id, out);
        }
        self.let_go(now, out);
        self.try_form(now, out);
        Ok(Reply::Drained(place))
    }

    fn can_do_without(&self, node_rank: u32) -> Result<(), Refusal> {
        let world = self.config.world;
        if !world.elastic() {
            let why = "the world is fixed (--nnodes MIN:MAX makes it elastic)".to_owned();
            return Err(Refusal::Needed { node_rank, why });
        }
        let stays = |place: &u32| *place != node_rank && !self.orders.draining.contains(place);
        let staying = self.nodes.living().filter(stays).count();
        if staying < world.min_nodes as usize {
            let why = format!("{staying} nodes would remain, and the fewest are {}", world.min_nodes);
            return Err(Refusal::Needed { node_rank, why });
        }
        Ok(())
    }

    /// Whether a seat's node is to go.
    pub(super) fn drained(&self, seat: Seat) -> bool {
        self.orders.draining.contains(&self.config.world.node_of(seat))
    }

    /// Whether a seat's worker is to go and holds nothing that anybody needs: it is no member of the generation that runs; between two,
    /// it was in none yet, or the last one has left a checkpoint behind.
    pub(super) fn may_go(&self, seat: Seat) -> bool {
        let Some(worker) = self.roster.living_at(seat).filter(|_| self.drained(seat)) else { return false };
        match &self.phase {
            Phase::Running(running) => running.rank_of(worker.id).is_none(),
            Phase::Gathering(gathering) => worker.generation.0 == 0 || (gathering.relieved && worker.ready),
            Phase::Over(_) => false,
        }
    }

    /// Tells a worker to leave if it may go.
    pub(super) fn dismiss(&self, id: WorkerId, out: &mut Vec<Action>) {
        if self.orders.draining.is_empty() {
            return;
        }
        let Some(worker) = self.roster.living().find(|worker| worker.id == id) else { return };
        if let Some(line) = worker.line.filter(|_| self.may_go(worker.seat())) {
            let reason = format!("node {} is drained", self.config.world.node_of(worker.seat()));
            out.push(Action::Tell(line, Directive::Dismiss(reason)));
        }
    }

    /// Asks a generation with members that are to go to end at the next boundary.
    pub(super) fn let_go(&mut self, now: Timestamp, out: &mut Vec<Action>) {
        let Phase::Running(running) = &self.phase else { return };
        let some_go = running.assignment.members.iter().any(|member| self.drained(member.seat));
        if some_go && !running.regroup && !running.done() && self.orders.stop.is_none() {
            self.regroup(now, true, out);
        }
    }

    /// A worker of a node that is to go was lost before it could leave.
    pub(super) fn lose_drained(
        &mut self,
        now: Timestamp,
        seat: Seat,
        failure: Failure,
        out: &mut Vec<Action>,
    ) {
        let failure = Arc::new(failure);
        if matches!(self.phase, Phase::Running(_)) && !self.is_member(seat) {
            return out.push(Action::Publish(News::Consequence(failure)));
        }
        let incident = self.incident.get_or_insert_with(|| Incident::new(now));
        incident.lose(seat);
        incident.cause.get_or_insert_with(|| failure.clone());
        out.push(Action::Record(Record::Failure(failure.clone())));
        out.push(Action::Publish(News::Failure(failure.clone(), self.spent.clone())));
        let because = format!("rank {seat} of a node that was to leave is lost: {}", failure.message);
        self.break_up(now, &because, true, out);
    }

    /// Whoever has this place from now on is to stay.
    pub(super) fn forget_drain(&mut self, place: u32, out: &mut Vec<Action>) {
        if self.orders.draining.contains(&place) {
            self.order(|orders| orders.draining.retain(|other| *other != place), out);
        }
    }
}
