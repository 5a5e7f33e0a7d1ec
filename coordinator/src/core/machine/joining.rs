//! Places and lines: nodes and workers come, stay connected, and are told what they missed.

use coxswain_proto::{
    ids::{Seat, WorkerId},
    plan::Plan,
};

use super::{Machine, Refusal, Reply, Timestamp};
use crate::core::{
    action::{Action, Directive, Record},
    event::{NodeClaim, Origin, StreamId, WorkerClaim},
    news::{MemberChange, News},
    nodes::Placed,
    phase::Phase,
    reason::Reason,
    refusal::Witness,
};

impl Machine {
    pub(super) fn join_node(
        &mut self,
        now: Timestamp,
        claim: NodeClaim,
        out: &mut Vec<Action>,
    ) -> Result<Reply, Refusal> {
        self.welcome(&claim.origin)?;
        // Its line follows at once; a launcher that dies before it does must not keep its place.
        let patience = self.config.patience.reunion;
        let (world, roster) = (self.config.world, &self.roster);
        let lines = |place| world.seats_of(place).filter_map(|seat| roster.living_at(seat)?.line);
        let placed = self.nodes.place(now, &claim, patience, |place| lines(place).next().is_some())?;
        self.watch_for_loss(now.after(patience));
        let place = placed.node_rank();
        if let Placed::New(_) | Placed::Instead(_) = placed {
            if !claim.returns {
                self.launches(now, place);
            }
            self.forget_drain(place, out);
            if matches!(placed, Placed::Instead(_)) {
                self.replace_launch(now, &[place], out);
            }
        }
        if !matches!(placed, Placed::Again(_)) {
            self.node_is_there(place, out);
        }
        let first = Seat(place * self.config.world.nproc_per_node);
        Ok(Reply::Placed { node_rank: place, first })
    }

    pub(super) fn open_node_line(
        &mut self,
        now: Timestamp,
        node_id: &str,
        stream: StreamId,
        out: &mut Vec<Action>,
    ) -> Result<Reply, Refusal> {
        let (place, node) = self.nodes.find(node_id)?;
        let recalled = std::mem::take(&mut node.recalled);
        let first = !std::mem::replace(&mut node.followed, true);
        self.reunited |= recalled;
        let was_gone = std::mem::take(&mut node.gone);
        let old = node.line.replace(stream);
        if was_gone {
            self.node_is_there(place, out);
        }
        match old {
            Some(old) => out.push(Action::Close(old)),
            None => self.launcher_follows(now, place, !first),
        }
        Ok(Reply::Done)
    }

    /// A launcher has a place, for the first time or again.
    fn node_is_there(&self, place: u32, out: &mut Vec<Action>) {
        let Some(node) = self.nodes.at(place) else { return };
        let (node_id, host) = (node.node_id.clone(), node.host.clone());
        out.push(Action::Record(Record::Node { place, node_id, host: host.clone() }));
        self.announce(MemberChange::NodeJoined { node_rank: place, host }, out);
    }

    /// Tells a launcher whose line was opened which workers it is to start.
    pub(super) fn replay_node(
        &mut self,
        now: Timestamp,
        node_id: &str,
        stream: StreamId,
        out: &mut Vec<Action>,
    ) {
        let Ok((place, _)) = self.nodes.find(node_id) else { return };
        for respawn in self.config.world.seats_of(place).filter_map(|seat| self.roster.respawn(seat)) {
            self.starts.expect(now, respawn.seat);
            out.push(Action::TellNode(stream, respawn.clone()));
        }
    }

    pub(super) fn node_line_closed(&mut self, now: Timestamp, node_id: &str, stream: StreamId) {
        let within = self.config.patience.node;
        if let Some(gone_at) = self.nodes.line_closed(now, node_id, stream, within) {
            self.watch_for_loss(gone_at);
        }
    }

    /// Whether a caller belongs here.
    pub(super) fn welcome(&self, origin: &Origin) -> Result<Reply, Refusal> {
        if origin.version != self.config.version {
            let (theirs, ours) = (origin.version.clone(), self.config.version.clone());
            return Err(Refusal::Version { theirs, ours });
        }
        if !origin.run_id.is_empty() {
            self.same_run(&origin.run_id)?;
        }
        match self.phase {
            Phase::Over(_) => Err(Refusal::Over(self.reason.clone())),
            Phase::Gathering(_) | Phase::Running(_) => Ok(Reply::Welcome),
        }
    }

    /// Whether a caller means this run.
    pub(super) fn same_run(&self, run_id: &str) -> Result<(), Refusal> {
        if run_id != self.config.run_id {
            let (theirs, ours) = (run_id.to_owned(), self.config.run_id.clone());
            return Err(Refusal::OtherRun { theirs, ours });
        }
        Ok(())
    }

    pub(super) fn register(
        &mut self,
        now: Timestamp,
        claim: WorkerClaim,
        out: &mut Vec<Action>,
    ) -> Result<Reply, Refusal> {
        self.welcome(&claim.origin)?;
        let (seat, world) = (claim.seat, self.config.world.size());
        if seat.0 >= world {
            return Err(Refusal::RankOutside { seat, world });
        }
        let dataset = self.agree_on_data(&claim)?;
        let plan = Plan::new(&self.config.train, claim.dataset.training_samples)?;
        if let Some(again) = self.seat_for(now, &claim, out)? {
            return Ok(Reply::Registered(again));
        }
        let (host, pid, device) = (claim.host.clone(), claim.pid, claim.device.clone());
        let asked_before = self.orders.checkpoints;
        // Until its line is open, it has the time of one that is.
        let worker = self.roster.enter(now, claim.clone(), self.config.patience.hang);
        worker.asked_before = asked_before;
        let id = worker.id;
        if let Some(dataset) = dataset {
            out.push(Action::Record(Record::DataSet(dataset.0.clone())));
            self.dataset = Some(dataset);
        }
        self.plan = Some(plan);
        self.cache.planned(&plan);
        out.push(Action::Record(Record::Worker(id, claim)));
        self.watch_for_loss(now.after(self.config.patience.hang));
        self.announce(MemberChange::Registered { seat, host, pid, device }, out);
        self.has_started(now, seat, out);
        self.count_present(out);
        Ok(Reply::Registered(id))
    }

    /// Whether a worker may have its seat: the id it has already, or nothing if it is to have a new one.
    fn seat_for(
        &mut self,
        now: Timestamp,
        claim: &WorkerClaim,
        out: &mut Vec<Action>,
    ) -> Result<Option<WorkerId>, Refusal> {
        let seat = claim.seat;
        let Some(holder) = self.roster.at(seat) else { return Ok(None) };
        let same = holder.claim.incarnation == claim.incarnation;
        match holder.gone {
            Some(_) if same => Err(Refusal::Fenced { seat }),
            Some(_) => Ok(None),
            None if same => {
                let id = holder.id;
                self.roster.get_mut(id)?.last_seen = now;
                Ok(Some(id))
            }
            None if holder.line.is_some() || holder.lines == 0 => {
                let (host, pid) = (holder.claim.host.clone(), holder.claim.pid);
                Err(Refusal::RankTaken { seat, host, pid })
            }
            None => {
                let message = "its line closed, and another process came in its place".to_owned();
                self.roster.refill(seat);
                self.lose_silently(now, seat, message, out);
                match self.phase {
                    Phase::Over(_) => Err(Refusal::Over(self.reason.clone())),
                    _ => Ok(None),
                }
            }
        }
    }

    pub(super) fn open_line(
        &mut self,
        now: Timestamp,
        id: WorkerId,
        incarnation: &str,
        stream: StreamId,
        out: &mut Vec<Action>,
    ) -> Result<Reply, Refusal> {
        let recalled = self.roster.is_recalled(id);
        let worker = self.roster.living_mut(id)?;
        if worker.claim.incarnation != incarnation {
            return Err(Refusal::UnknownWorker(id));
        }
        self.reunited |= recalled;
        let again = worker.lines > 0;
        worker.lines += 1;
        worker.last_seen = now;
        let seat = worker.seat();
        out.extend(worker.line.replace(stream).map(Action::Close));
        self.watch_for_loss(now.after(self.config.patience.hang));
        if again {
            self.announce(MemberChange::LineOpened { seat }, out);
        }
        Ok(Reply::Done)
    }

    /// Tells a worker whose line was opened everything that still applies.
    pub(super) fn replay(&mut self, id: WorkerId, stream: StreamId, out: &mut Vec<Action>) {
        let rank = self.phase.training_mut().and_then(|training| training.course.ledger.rank_of(id));
        let leases = rank.map_or_else(Vec::new, |rank| self.held_by(rank));
        let Ok(worker) = self.roster.get_mut(id) else { return };
        let (generation, ready, asked_before) = (worker.generation, worker.ready, worker.asked_before);
        let again = worker.lines > 1;
        let mut tell = |directive| out.push(Action::Tell(stream, directive));
        let over = matches!(self.phase, Phase::Over(_));
        let reason = self.reason.to_string();
        match &mut self.phase {
            Phase::Running(running) if running.rank_of(id).is_some() => {
                let rank = running.rank_of(id).unwrap_or_default();
                tell(Directive::Assignment(running.assignment.clone(), rank));
                leases.into_iter().for_each(|lease| tell(Directive::Lease(lease)));
                if running.regroup {
                    let (generation, checkpoint) = (running.assignment.generation, running.hand_over);
                    tell(Directive::Regroup { generation, checkpoint });
                }
            }
            Phase::Over(_) => tell(Directive::Abort { generation: self.generation, reason, over }),
            // It has not heard yet that its generation is over.
            _ if !ready && generation.0 > 0 => tell(Directive::Abort { generation, reason, over }),
            _ => {}
        }
        let orders = &self.orders;
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
            tell(Directive::MemoryReport(orders.memory_reports));
        }
        if let Some(reason) = &orders.stop {
            tell(Directive::Stop(reason.clone()));
        }
        self.dismiss(id, out);
    }

    pub(super) fn line_closed(
        &mut self,
        now: Timestamp,
        id: WorkerId,
        stream: StreamId,
        out: &mut Vec<Action>,
    ) {
        let patience = self.config.patience;
        let Ok(worker) = self.roster.get_mut(id) else { return };
        if worker.line != Some(stream) {
            return;
        }
        worker.line_closed(now, patience.silence);
        if worker.gone.is_some() {
            return;
        }
        let (seat, lost_at) = (worker.seat(), worker.lost_at(&patience));
        self.watch_for_loss(lost_at);
        if !matches!(self.phase, Phase::Over(_)) {
            self.announce(MemberChange::LineClosed { seat }, out);
        }
    }

    /// Says how many are there, while some are missing.
    fn count_present(&mut self, out: &mut Vec<Action>) {
        if matches!(self.phase, Phase::Gathering(_)) && self.incident.is_none() {
            self.say(self.incomplete(), out);
        }
    }

    pub(super) fn incomplete(&self) -> Reason {
        let (present, world) = (self.roster.present(), self.config.world);
        Reason::Incomplete { present, world: world.size(), enough: world.least() }
    }

    pub(super) fn announce(&self, change: MemberChange, out: &mut Vec<Action>) {
        out.push(Action::Publish(News::Member {
            generation: self.generation_now(),
            present: self.roster.present(),
            world: self.config.world.size(),
            change,
        }));
    }

    /// The first data set seen if it is this one; an error if another was seen before.
    fn agree_on_data(
        &self,
        claim: &WorkerClaim,
    ) -> Result<Option<(crate::core::event::DataSet, Witness)>, Refusal> {
        match &self.dataset {
            None => {
                let witness = Witness::Seat(claim.seat, claim.host.clone());
                Ok(Some((claim.dataset.clone(), witness)))
            }
            Some((ours, _)) if *ours == claim.dataset => Ok(None),
            Some((ours, witness)) => Err(Refusal::OtherDataSet {
                seat: claim.seat,
                theirs: claim.dataset.clone(),
                witness: witness.clone(),
                ours: ours.clone(),
            }),
        }
    }
}
