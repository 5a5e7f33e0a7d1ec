//! Rendezvous: nodes and workers come, until the world is complete.

use std::sync::Arc;

use coxswain_proto::{
    ids::{Rank, WorkerId},
    plan::Plan,
};

use super::{Machine, Refusal, Reply, Timestamp};
use crate::core::{
    action::{Action, Assignment, Directive, MemberChange, News, Peer, Record},
    event::{NodeClaim, Origin, StreamId, WorkerClaim},
    phase::Phase,
    reason::Reason,
    refusal::Witness,
};

impl Machine {
    pub(super) fn join_node(&mut self, claim: NodeClaim, out: &mut Vec<Action>) -> Result<Reply, Refusal> {
        self.welcome(&claim.origin)?;
        let (node_rank, new) = self.roster.place(&claim)?;
        if new {
            self.announce(MemberChange::NodeJoined { node_rank, host: claim.host }, out);
        }
        let first_rank = Rank(node_rank * self.config.world.nproc_per_node);
        Ok(Reply::Placed { node_rank, first_rank })
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
            Phase::Searching(_) | Phase::Over(_) => Err(Refusal::Over(self.reason.clone())),
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
        let dataset = self.agree_on_data(&claim)?;
        let plan = Plan::new(&self.config.train, claim.dataset.training_samples)?;
        let (rank, host, pid, device) = (claim.rank, claim.host.clone(), claim.pid, claim.device.clone());
        let (id, new) = self.roster.enter(now, claim)?;
        if let Some(dataset) = dataset {
            out.push(Action::Record(Record::DataSet(dataset.0.clone())));
            self.dataset = Some(dataset);
        }
        self.plan = Some(plan);
        self.watch_for_loss(now.after(self.config.patience.silence));
        if new {
            self.announce(MemberChange::Registered { rank, host, pid, device }, out);
            self.gather(out);
        }
        Ok(Reply::Registered(id))
    }

    pub(super) fn open_line(
        &mut self,
        now: Timestamp,
        id: WorkerId,
        incarnation: &str,
        stream: StreamId,
        out: &mut Vec<Action>,
    ) -> Result<Reply, Refusal> {
        let worker = self.roster.get_mut(id)?;
        if worker.claim.incarnation != incarnation || worker.gone.is_some() {
            return Err(Refusal::UnknownWorker(id));
        }
        let again = worker.lines > 0;
        worker.lines += 1;
        worker.last_seen = now;
        let rank = worker.claim.rank;
        if let Some(old) = worker.line.replace(stream) {
            out.push(Action::Close(old));
        }
        if again {
            self.announce(MemberChange::LineOpened { rank }, out);
        }
        Ok(Reply::Done)
    }

    /// Tells a worker whose line was opened everything that still applies.
    pub(super) fn replay(&mut self, id: WorkerId, stream: StreamId, out: &mut Vec<Action>) {
        let Ok(worker) = self.roster.get_mut(id) else { return };
        let rank = worker.claim.rank;
        let mut tell = |directive| out.push(Action::Tell(stream, directive));
        match &mut self.phase {
            Phase::Gathering(_) => {}
            Phase::Running(running) => {
                tell(Directive::Assignment(running.assignment.clone(), rank));
                let committed = running.ledger.committed();
                if let Some(lease) = running.leases.replay(rank, committed) {
                    tell(Directive::Lease(lease));
                }
            }
            Phase::Searching(_) | Phase::Over(_) => {
                tell(Directive::Abort(self.generation, self.reason.to_string()));
            }
        }
        let orders = &self.orders;
        if orders.pause {
            tell(Directive::Pause);
        }
        if orders.checkpoints > 0 {
            tell(Directive::Checkpoint(orders.checkpoints));
        }
        if orders.memory_reports > 0 {
            tell(Directive::MemoryReport(orders.memory_reports));
        }
        if let Some(reason) = &orders.stop {
            tell(Directive::Stop(reason.clone()));
        }
    }

    pub(super) fn line_closed(&mut self, id: WorkerId, stream: StreamId, out: &mut Vec<Action>) {
        let Ok(worker) = self.roster.get_mut(id) else { return };
        if worker.line != Some(stream) {
            return;
        }
        worker.line = None;
        if worker.gone.is_some() {
            return;
        }
        let (rank, lost_at) = (worker.claim.rank, worker.lost_at(&self.config.patience));
        self.watch_for_loss(lost_at);
        if !matches!(self.phase, Phase::Over(_)) {
            self.announce(MemberChange::LineClosed { rank }, out);
        }
    }

    /// Forms the generation if every rank is there.
    fn gather(&mut self, out: &mut Vec<Action>) {
        let (present, world) = (self.roster.present(), self.config.world.size());
        if !matches!(self.phase, Phase::Gathering(_)) {
            return;
        }
        match self.plan {
            Some(plan) if self.roster.complete() => self.start_generation(plan, out),
            _ => self.say(Reason::Incomplete { present, world }, out),
        }
    }

    /// The membership as its workers are told.
    pub(super) fn assignment(&self) -> Arc<Assignment> {
        let peers = self.roster.workers().map(|worker| Peer {
            data_address: worker.claim.data_address.clone(),
            host: worker.claim.host.clone(),
        });
        Arc::new(Assignment {
            generation: self.generation,
            first_step: self.progress.committed,
            peers: peers.collect(),
        })
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
                let witness = Witness::Rank(claim.rank, claim.host.clone());
                Ok(Some((claim.dataset.clone(), witness)))
            }
            Some((ours, _)) if *ours == claim.dataset => Ok(None),
            Some((ours, witness)) => Err(Refusal::OtherDataSet {
                rank: claim.rank,
                theirs: claim.dataset.clone(),
                witness: witness.clone(),
                ours: ours.clone(),
            }),
        }
    }
}
