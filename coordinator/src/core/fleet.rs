//! Who is there: launchers and workers, their lines, the processes that are on their way, and whether all of
//! them move.
//!
//! It answers which workers are missed and which may be assigned, and enters new ones; who is lost is found
//! in `losses`. What follows for the run is not its affair.

use std::collections::{BTreeSet, HashMap};

use coxswain_proto::{
    ids::{Generation, Slot, WorkerId},
    limits::START_FLOOR,
};

use super::{
    action::{self, Action, Record},
    event::{Beat, NodeClaim, StreamId, WorkerClaim},
    failure::Failure,
    line::Line,
    motion::{MemberMotion, Motion},
    nodes::{NodePlacement, Nodes},
    past::Past,
    reason::Reason,
    refusal::Refusal,
    report::WorkerPhase,
    roster::{Exit, Respawn, Roster, Worker, WorkerMut},
    starts::Starts,
    time::Timestamp,
};
use crate::options::{CauseKind, Patience, World};

/// All launchers and workers of a run.
#[derive(Clone, Debug)]
pub struct Fleet {
    /// How many there may be.
    pub world: World,
    /// How long they are waited for.
    pub patience: Patience,
    /// Workers.
    pub roster: Roster,
    /// Launchers.
    pub nodes: Nodes,
    /// Processes that have not made themselves known.
    pub starts: Starts,
    /// How long work takes.
    pub motion: Motion,
    /// A worker or launcher of an earlier life of the coordinator has been heard of in this one.
    pub(super) reunited: bool,
    /// The place of the launcher that is gone with the coordinator before this one.
    pub(super) deserted: Option<u32>,
    /// When to look for lost workers and nodes; none counts as lost before.
    pub(super) next_loss: Option<Timestamp>,
}

/// A launcher has opened its line.
pub struct NodeFollows {
    /// Place.
    pub place: u32,
    /// It had been given up.
    pub was_gone: bool,
    /// The line that this one replaces.
    pub replaced: Option<StreamId>,
}

impl Fleet {
    /// No worker is there yet. `life` counts the coordinator's starts; workers from before a `new_launch` are
    /// not expected back.
    pub fn new(world: World, patience: Patience, life: u32, new_launch: bool) -> Self {
        Self {
            world,
            patience,
            roster: Roster::new(world.size(), life),
            nodes: Nodes::new(world, new_launch),
            starts: Starts::default(),
            motion: Motion::default(),
            reunited: false,
            deserted: None,
            next_loss: None,
        }
    }

    /// Takes over nodes and slots of an earlier life of the coordinator; they are missed after the reunion.
    /// Those of the launcher `gone`, whose machine the coordinator has left, are missed before it.
    pub fn recall(&mut self, now: Timestamp, past: &Past, gone: Option<&str>) {
        let reunion = self.patience.reunion;
        let of_gone = past.nodes.iter().find(|(_, node)| Some(node.node_id.as_str()) == gone);
        self.deserted = of_gone.map(|(place, _)| *place);
        let (deserted, silence) = (self.deserted, self.patience.silence);
        let within = |place| if deserted == Some(place) { silence } else { reunion };
        self.motion.begin(now.after(reunion));
        self.motion.look_at = now.after(reunion);
        for (place, node) in &past.nodes {
            self.nodes.recall(now, *place, node.clone(), within(*place));
        }
        let mut assigned = HashMap::<_, Generation>::new();
        for (generation, of) in [past.newest(), past.started()].into_iter().flatten() {
            for (_, member) in &of.members {
                let newest = assigned.entry(*member).or_default();
                *newest = (*newest).max(generation);
            }
        }
        let size = self.roster.size();
        for (slot, kept) in past.slots.iter().filter(|(slot, _)| slot.0 < size) {
            if let Some(respawn) = kept.respawn.clone() {
                self.roster.recall_respawn(respawn);
            }
            if let Some((id, claim)) = kept.worker.clone().filter(|(_, claim)| claim.slot == *slot) {
                let place = self.world.node_of(*slot);
                let mut worker = Worker::new(now, id, claim, Line::opened_before(now, within(place)));
                let noted = past.health.get(slot).and_then(|health| health.noted);
                worker.notes = noted.filter(|(of, _)| *of == id).map_or(0, |(_, sequence)| sequence);
                worker.generation = assigned.get(&id).copied().unwrap_or_default();
                worker.gone = kept.left.map(Exit::Left);
                // The slot has a worker again, which is what was asked for; only the count goes on.
                self.roster.put(worker);
            }
        }
        self.next_loss = self.next_possible_loss();
    }

    /// Gives a launcher its place. One that has just taken it starts all of its workers by itself.
    pub fn place(&mut self, now: Timestamp, claim: &NodeClaim) -> Result<NodePlacement, Refusal> {
        // Its line follows at once; a launcher that dies before it does must not keep its place.
        let (world, roster, patience) = (self.world, &self.roster, self.patience.reunion);
        let connected = |place| world.slots_of(place).any(|slot| roster.line(slot).is_some());
        let placed = self.nodes.place(now, claim, patience, connected)?;
        self.watch_for_loss(now.after(patience));
        if matches!(placed, NodePlacement::New(_) | NodePlacement::Instead(_)) && !claim.returns {
            for slot in world.slots_of(placed.node_rank()) {
                self.roster.forget_respawn(slot);
                self.starts.begin(now, slot);
            }
        }
        // Its starts were forgotten when it was called gone.
        if let NodePlacement::Back(place) = placed {
            for slot in world.slots_of(place).filter(|slot| self.roster.at(*slot).is_none()) {
                self.starts.begin(now, slot);
            }
        }
        Ok(placed)
    }

    /// A launcher opens its line. What it starts it starts now; a launcher that was cut off may have been
    /// stopped. Which slots had a worker is known, so if it comes back, processes are on the way to the
    /// others.
    pub fn node_follows(
        &mut self,
        now: Timestamp,
        node_id: &str,
        stream: StreamId,
    ) -> Result<NodeFollows, Refusal> {
        let (place, node) = self.nodes.find(node_id)?;
        self.reunited |= std::mem::take(&mut node.recalled);
        // Its starts are forgotten when it is called gone, though it may never have had a line.
        let was_gone = std::mem::take(&mut node.gone);
        let returns = was_gone || node.line.opened > 0;
        let replaced = node.line.open(stream);
        if replaced.is_none() {
            for slot in self.world.slots_of(place) {
                if self.starts.at(slot) || (returns && self.roster.at(slot).is_none()) {
                    self.starts.begin(now, slot);
                }
            }
        }
        Ok(NodeFollows { place, was_gone, replaced })
    }

    /// What a launcher was asked to start and has not, for a line that was opened.
    pub fn not_started(&mut self, now: Timestamp, place: u32) -> Vec<Respawn> {
        let respawns = self.world.slots_of(place).filter_map(|slot| self.roster.respawn(slot).cloned());
        let respawns: Vec<_> = respawns.collect();
        respawns.iter().for_each(|respawn| self.starts.expect(now, respawn.slot));
        respawns
    }

    /// A launcher's line was closed.
    pub fn node_line_closed(&mut self, now: Timestamp, node_id: &str, stream: StreamId) {
        if let Some(gone_at) = self.nodes.line_closed(now, node_id, stream, self.patience.node) {
            self.watch_for_loss(gone_at);
        }
    }

    /// Enters a worker at a slot that no living worker has. Until its line is open, it has the time of one
    /// that is.
    pub fn enter(&mut self, now: Timestamp, claim: WorkerClaim, asked_before: u32) -> WorkerId {
        let hang = self.patience.hang;
        let id = self.roster.enter(now, claim, hang);
        if let Ok(mut worker) = self.roster.get_mut(id) {
            worker.asked_before = asked_before;
        }
        self.watch_for_loss(now.after(hang));
        id
    }

    /// A worker opens its line; the line that it replaces.
    pub fn follows(
        &mut self,
        now: Timestamp,
        id: WorkerId,
        incarnation: &str,
        stream: StreamId,
    ) -> Result<Option<StreamId>, Refusal> {
        let recalled = self.roster.is_recalled(id);
        let mut worker = self.roster.living_mut(id)?;
        if worker.claim.incarnation != incarnation {
            return Err(Refusal::UnknownWorker(id));
        }
        worker.last_seen = now;
        let replaced = worker.line.open(stream);
        drop(worker);
        self.reunited |= recalled;
        self.watch_for_loss(now.after(self.patience.hang));
        Ok(replaced)
    }

    /// A worker's line was closed: its slot, if that was its newest line and it is not gone.
    pub fn line_closed(&mut self, now: Timestamp, id: WorkerId, stream: StreamId) -> Option<Slot> {
        let mut worker = self.roster.get_mut(id).ok()?;
        if worker.line.stream != Some(stream) {
            return None;
        }
        worker.line.close(now, self.patience.silence);
        if worker.gone.is_some() {
            return None;
        }
        let (slot, lost_at) = (worker.slot(), worker.lost_at(&self.patience));
        drop(worker);
        self.watch_for_loss(lost_at);
        Some(slot)
    }

    /// A living worker has called: it is alive.
    pub fn seen(&mut self, now: Timestamp, id: WorkerId) -> Result<WorkerMut<'_>, Refusal> {
        let mut worker = self.roster.living_mut(id)?;
        worker.last_seen = now;
        Ok(worker)
    }

    /// What a heartbeat says of a worker's motion; its slot if it had been named, and moves again.
    pub fn note_motion(&mut self, beat: &Beat) -> Option<Slot> {
        self.motion.learn(&beat.paces);
        let mut worker = self.roster.get_mut(beat.worker).ok()?;
        let moves = worker.named_for > 0 && beat.still <= self.patience.standstill;
        if moves {
            worker.named_for = 0;
        }
        moves.then(|| worker.slot())
    }

    /// Asks the launcher of a slot for a new process, if there ever was a launcher: one that is missed hears
    /// it when it is back, and one that has taken its place by then starts all of its processes by itself.
    pub fn call_back(&mut self, now: Timestamp, slot: Slot, reason: String, out: &mut Vec<Action>) {
        let place = self.world.node_of(slot);
        let respawn = match self.nodes.at(place) {
            // A process is on its way, of another launcher perhaps, or has come by itself: to ask for one
            // would end that.
            Some(_) if self.starts.at(slot) || self.roster.refilled(slot) => None,
            Some(_) => self.roster.ask_respawn(slot, reason).cloned(),
            None => None,
        };
        out.push(Action::Record(Record::Lost { slot, respawn: respawn.clone() }));
        if let (Some(stream), Some(respawn)) = (self.nodes.line(place), respawn) {
            self.starts.begin(now, slot);
            out.push(Action::TellNode(stream, respawn));
        }
    }

    /// No process is wanted at a slot any more, whatever its launcher was asked for.
    pub fn withdraw(&mut self, slot: Slot, out: &mut Vec<Action>) {
        if self.roster.withdraw(slot) && self.roster.living_at(slot).is_none() {
            out.push(Action::Record(Record::Lost { slot, respawn: None }));
        }
    }

    /// What is known of a worker, as a failure.
    pub fn failure_of(
        &self,
        slot: Slot,
        kind: CauseKind,
        message: String,
        generation: Generation,
    ) -> Failure {
        let mut failure = Failure { slot: Some(slot), generation, ..Failure::of_run(kind, message) };
        if self.starts.at(slot) && self.roster.living_at(slot).is_none() {
            failure.host = self.nodes.host(self.world.node_of(slot)).to_owned();
            failure.phase = WorkerPhase::Starting;
        } else if let Some(worker) = self.roster.at(slot) {
            failure.host.clone_from(&worker.claim.host);
            failure.phase = worker.doing.phase;
            failure.step = worker.doing.step;
            failure.collective = worker.doing.collective.0;
            failure.memory_in_use = worker.doing.memory_in_use;
        }
        failure
    }

    /// A process has made itself known at its slot; whether its start had been named for taking long.
    pub fn has_started(&mut self, now: Timestamp, slot: Slot) -> bool {
        let Some(start) = self.starts.end(now, slot) else { return false };
        self.motion.learn(&[(WorkerPhase::Starting, start.took.max(START_FLOOR))]);
        start.named
    }

    /// A process has ended. False when that is no news.
    pub fn exited(&mut self, now: Timestamp, slot: Slot, pid: Option<u32>) -> bool {
        let news = self.roster.exited(slot, pid);
        let known = self.roster.at(slot).map(|worker| worker.claim.pid);
        // It may have been the one that is awaited there.
        if news && (pid.is_none() || known != pid) {
            self.starts.end(now, slot);
        }
        news
    }

    /// A process that never made itself known is given up. How long it was waited for counts as a start of
    /// that length, so a machine on which everything is slow has three times as long the next time, and does
    /// not use up the run's restarts.
    pub fn give_up_start(&mut self, now: Timestamp, slot: Slot) {
        if let Some(start) = self.starts.end(now, slot) {
            self.motion.learn(&[(WorkerPhase::Starting, start.took)]);
        }
    }

    /// Processes that are on their way to a slot without a living worker.
    pub fn on_their_way(&self, now: Timestamp) -> impl Iterator<Item = MemberMotion> {
        self.starts.members(now).filter(|start| self.roster.living_at(start.slot).is_none())
    }

    /// Everybody whose motion counts: workers, and processes on their way whose launcher can be told, and
    /// whose node is to stay.
    pub fn moving(&self, now: Timestamp, draining: &BTreeSet<u32>) -> impl Iterator<Item = MemberMotion> {
        let awaited = self.on_their_way(now).filter(|start| {
            let place = self.world.node_of(start.slot);
            self.nodes.line(place).is_some() && !draining.contains(&place)
        });
        self.roster.living().map(Worker::motion).chain(awaited)
    }

    /// A rank, or a start, is named for standing still, alone or for so many ranks; false if it has been
    /// before, likewise, and has not moved since.
    pub fn name(&mut self, member: &MemberMotion, ranks: usize) -> bool {
        match member.phase {
            WorkerPhase::Starting => self.starts.name(member.slot),
            _ => self.roster.name(member.slot, ranks),
        }
    }

    /// The worker at a slot is ready, and waits while others have places.
    pub fn now_spare(&mut self, slot: Slot) {
        if let Some(mut worker) = self.roster.at_mut(slot).filter(|worker| worker.gone.is_none()) {
            worker.without.spare = true;
        }
    }

    /// Whether a slot has a worker that can be assigned.
    pub fn assignable(&self, slot: Slot) -> bool {
        self.roster.at(slot).is_some_and(Worker::assignable)
    }

    /// Slots of nodes that are there to stay, without a worker that can be assigned.
    pub fn missing(&self, draining: &BTreeSet<u32>) -> impl Iterator<Item = Slot> {
        let places = self.nodes.living().filter(|place| !draining.contains(place));
        places.flat_map(|place| self.world.slots_of(place)).filter(|slot| !self.assignable(*slot))
    }

    /// A member of a generation, while it lives: another process may have its slot by now.
    pub fn there(&self, member: &action::Member) -> Option<&Worker> {
        self.roster.living_at(member.slot).filter(|worker| worker.id == member.worker)
    }

    /// The workers at these slots, as members of a generation.
    pub fn members(&self, slots: &[Slot]) -> Vec<action::Member> {
        let workers = slots.iter().filter_map(|slot| self.roster.living_at(*slot));
        workers.map(member).collect()
    }

    /// How many are there, of how many.
    pub fn incomplete(&self) -> Reason {
        let (present, world) = (self.roster.present(), self.world);
        Reason::Incomplete { present, world: world.size(), enough: world.least() }
    }
}

/// A worker, as the others of its generation are told of it.
pub fn member(worker: &Worker) -> action::Member {
    action::Member {
        worker: worker.id,
        slot: worker.slot(),
        data_address: worker.claim.data_address.clone(),
        host: worker.claim.host.clone(),
    }
}
