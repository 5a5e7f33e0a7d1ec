//! Places, slots and lines: nodes and workers come, stay connected, and are told what they missed.

use coxswain_proto::ids::{Slot, WorkerId};

use super::run::Run;
use crate::core::{
    action::{Action, Directive, Record, Reply},
    event::{NodeClaim, Origin, StreamId, Ticket, WorkerClaim},
    news::{MemberChange, News},
    nodes::NodePlacement,
    phase::Phase,
    refusal::Refusal,
};

/// The run, seen by a worker or launcher that comes.
pub(super) struct Arrivals<'a> {
    pub(super) run: &'a mut Run,
}

impl Arrivals<'_> {
    pub(super) fn join_node(&mut self, claim: &NodeClaim) -> Result<Reply, Refusal> {
        self.welcome(&claim.origin)?;
        let run = &mut *self.run;
        let placed = run.fleet.place(run.now, claim)?;
        let place = placed.node_rank();
        if let NodePlacement::New(_) | NodePlacement::Instead(_) = placed {
            run.forget_drain(place);
        }
        if matches!(placed, NodePlacement::New(_) | NodePlacement::Instead(_)) && !claim.returns {
            run.health.forget(run.config.world.slots_of(place), &mut run.out);
        }
        if let NodePlacement::Instead(_) = placed {
            run.replace_launch(&[place]);
        }
        if !matches!(placed, NodePlacement::Again(_)) {
            self.node_is_there(place);
        }
        // Workers of a node that was to go, and is to stay now, can have places again.
        self.run.try_form();
        let first = Slot(place * self.run.config.world.nproc_per_node);
        Ok(Reply::Placed { node_rank: place, first })
    }

    /// A launcher opens its line, and is told which workers it is to start.
    pub(super) fn follow_node(&mut self, ticket: Ticket, node_id: &str, stream: StreamId) {
        let now = self.run.now;
        let opened = match self.run.fleet.node_follows(now, node_id, stream) {
            Ok(opened) => opened,
            Err(refusal) => return self.run.reply(ticket, Err(refusal)),
        };
        if opened.was_gone {
            self.node_is_there(opened.place);
        }
        self.run.out.extend(opened.replaced.map(Action::Close));
        self.run.reply(ticket, Ok(Reply::Done));
        let respawns = self.run.fleet.not_started(now, opened.place).into_iter();
        self.run.out.extend(respawns.map(|respawn| Action::TellNode(stream, respawn)));
    }

    /// A launcher has a place, for the first time or again.
    fn node_is_there(&mut self, place: u32) {
        let Some(node) = self.run.fleet.nodes.at(place) else { return };
        let (node_id, host) = (node.node_id.clone(), node.host.clone());
        let version = self.run.config.version.clone();
        let record = Record::Node { place, node_id, host: host.clone(), version };
        self.run.out.push(Action::Record(record));
        self.run.announce(MemberChange::NodeJoined { node_rank: place, host });
    }

    /// Whether a caller belongs here.
    pub(super) fn welcome(&self, origin: &Origin) -> Result<(), Refusal> {
        if origin.version != self.run.config.version {
            let (theirs, ours) = (origin.version.clone(), self.run.config.version.clone());
            return Err(Refusal::Version { theirs, ours });
        }
        if !origin.run_id.is_empty() {
            self.run.is_this(&origin.run_id)?;
        }
        self.run.must_go_on()
    }

    pub(super) fn register(&mut self, claim: WorkerClaim) -> Result<Reply, Refusal> {
        self.welcome(&claim.origin)?;
        let (slot, world) = (claim.slot, self.run.config.world.size());
        if slot.0 >= world {
            return Err(Refusal::RankOutside { slot, world });
        }
        let holder = self.run.fleet.roster.living_at(slot);
        let is_holder = holder.is_some_and(|holder| holder.claim.incarnation == claim.incarnation);
        if let Some(health) = self.run.health.of_slot(slot).filter(|health| health.cordoned && !is_holder) {
            let (faults, newest) = (health.faults, health.newest.clone());
            return Err(Refusal::Cordoned { slot, faults, newest });
        }
        let plan = self.run.progress.plan_for(&claim)?;
        if let Some(again) = self.slot_for(&claim)? {
            return Ok(Reply::Registered(again));
        }
        let run = &mut *self.run;
        let (host, pid, device) = (claim.host.clone(), claim.pid, claim.device.clone());
        let id = run.fleet.enter(run.now, claim.clone(), run.orders.checkpoints);
        run.progress.planned(plan, &claim, &mut run.out);
        run.out.push(Action::Record(Record::Worker(id, Box::new(claim))));
        run.announce(MemberChange::Registered { slot, host, pid, device });
        if run.fleet.has_started(run.now, slot) {
            run.publish(News::Standstill(slot, "has registered".into()));
        }
        // How many are there is said while some are missing.
        if matches!(run.phase, Phase::Gathering(_)) && run.faults.incident.is_none() {
            run.say(run.fleet.incomplete());
        }
        // The worker in whose place it came may have been the last that others waited for.
        run.try_form();
        Ok(Reply::Registered(id))
    }

    /// Whether a worker may have its slot: the id it has already, or nothing if it is to have a new one.
    fn slot_for(&mut self, claim: &WorkerClaim) -> Result<Option<WorkerId>, Refusal> {
        let (run, slot) = (&mut *self.run, claim.slot);
        let Some(holder) = run.fleet.roster.at(slot) else { return Ok(None) };
        let same = holder.claim.incarnation == claim.incarnation;
        match holder.gone {
            Some(_) if same => Err(Refusal::Fenced { slot }),
            Some(_) => {
                if run.is_member(slot) && !run.progress.result_is_safe() {
                    // It was to go, and went when every step was done. Its generation cannot have the
                    // successor in its place.
                    run.shrink(slot, "another process took its place");
                }
                Ok(None)
            }
            None if same => {
                let id = holder.id;
                run.fleet.seen(run.now, id)?;
                Ok(Some(id))
            }
            None if holder.line.stream.is_some() || holder.line.opened == 0 => {
                let (host, pid) = (holder.claim.host.clone(), holder.claim.pid);
                Err(Refusal::RankTaken { slot, host, pid })
            }
            None => {
                run.fleet.roster.refill(slot);
                run.lose_silently(
                    slot,
                    "its connection closed, and another process took its place".to_owned(),
                );
                run.must_go_on().map(|()| None)
            }
        }
    }

    /// A worker opens its line, and is told everything that still applies.
    pub(super) fn follow(&mut self, ticket: Ticket, id: WorkerId, incarnation: &str, stream: StreamId) {
        let replaced = match self.run.fleet.follows(self.run.now, id, incarnation, stream) {
            Ok(replaced) => replaced,
            Err(refusal) => return self.run.reply(ticket, Err(refusal)),
        };
        self.run.out.extend(replaced.map(Action::Close));
        let roster = &self.run.fleet.roster;
        let again = |slot: &Slot| roster.at(*slot).is_some_and(|worker| worker.line.opened > 1);
        if let Some(slot) = roster.slot_of(id).ok().filter(again) {
            self.run.announce(MemberChange::LineOpened { slot });
        }
        // The answer comes before the directives, so that the line is there when they are sent.
        self.run.reply(ticket, Ok(Reply::Done));
        self.replay(id, stream);
        self.run.dismiss(id);
        self.run.try_form();
    }

    /// Tells a worker whose line was opened everything that still applies.
    fn replay(&mut self, id: WorkerId, stream: StreamId) {
        let run = &mut *self.run;
        let rank = run.progress.rank_of(id);
        let leases = rank.map_or_else(Vec::new, |rank| run.progress.held_by(rank));
        let worker = run.fleet.roster.slot_of(id).ok().and_then(|slot| run.fleet.roster.at(slot));
        let Some(worker) = worker else { return };
        let (again, asked_before) = (worker.line.opened > 1, worker.asked_before);
        let (leaving, generation) = (worker.is_leaving(), worker.generation);
        let idle = generation < run.generation;
        let (over, reason) = (run.phase.is_over(), run.voice.reason.to_string());
        let mut tell = |directive| run.out.push(Action::Tell(stream, directive));
        match &run.phase {
            Phase::Running(running) if running.rank_of(id).is_some() => {
                let rank = running.rank_of(id).unwrap_or_default();
                tell(Directive::Assignment(running.assignment.clone(), rank));
                leases.into_iter().for_each(|lease| tell(Directive::Lease(lease)));
                if running.regroup {
                    let (generation, checkpoint) = (running.assignment.generation, running.hand_over);
                    tell(Directive::Regroup { generation, checkpoint });
                }
            }
            Phase::Over(over) if idle && over.end.in_order() => tell(Directive::Dismiss(reason)),
            Phase::Over(_) => tell(Directive::Abort { generation: run.generation, reason, over }),
            // It has not heard yet that its generation is over.
            _ if leaving => tell(Directive::Abort { generation, reason, over }),
            _ => {}
        }
        let orders = &run.orders;
        match orders.pause {
            true => tell(Directive::Pause),
            // A level, not an edge: the line may have been broken when the run was told to go on.
            false if again => tell(Directive::Resume),
            false => {}
        }
        if orders.checkpoints > asked_before {
            tell(Directive::Checkpoint(orders.checkpoints));
        }
        if orders.memory_reports > 0 {
            tell(orders.memory());
        }
        if let Some(reason) = &orders.stop {
            tell(Directive::Stop(reason.clone()));
        }
    }

    pub(super) fn line_closed(&mut self, id: WorkerId, stream: StreamId) {
        let closed = self.run.fleet.line_closed(self.run.now, id, stream);
        if let Some(slot) = closed.filter(|_| !self.run.phase.is_over()) {
            self.run.announce(MemberChange::LineClosed { slot });
        }
    }
}
