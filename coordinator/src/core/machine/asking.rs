//! What people ask of a run.

use std::sync::Arc;

use coxswain_proto::{ids::Step, limits};

use super::{Machine, Refresh, Refusal, Reply, Ticket, Timestamp};
use crate::core::{
    action::{Action, Directive, News},
    memory::RankMemory,
    phase::{End, Phase},
    reason::Reason,
    status::{RankStatus, Status},
};

impl Machine {
    pub(super) fn pause(&mut self, out: &mut Vec<Action>) -> Result<Reply, Refusal> {
        self.must_go_on()?;
        if !self.orders.pause && self.orders.stop.is_none() {
            self.orders.pause = true;
            self.tell_all(&Directive::Pause, out);
            if self.training() {
                self.say(Reason::Pausing, out);
            }
        }
        Ok(Reply::Phase(self.run_phase()))
    }

    pub(super) fn resume(&mut self, out: &mut Vec<Action>) -> Result<Reply, Refusal> {
        self.must_go_on()?;
        if self.orders.pause {
            self.orders.pause = false;
            self.tell_all(&Directive::Resume, out);
            if self.training() {
                self.say(Reason::Resumed, out);
            }
        }
        Ok(Reply::Phase(self.run_phase()))
    }

    pub(super) fn checkpoint_now(&mut self, out: &mut Vec<Action>) -> Result<Reply, Refusal> {
        self.must_go_on()?;
        self.orders.checkpoints = self.orders.checkpoints.saturating_add(1);
        self.tell_all(&Directive::Checkpoint(self.orders.checkpoints), out);
        Ok(Reply::Done)
    }

    pub(super) fn stop(
        &mut self,
        now: Timestamp,
        reason: String,
        out: &mut Vec<Action>,
    ) -> Result<Reply, Refusal> {
        self.must_go_on()?;
        if self.orders.stop.is_none() {
            self.orders.stop = Some(reason.clone());
            if matches!(self.phase, Phase::Gathering(_)) {
                let directive = Directive::Abort(self.generation_now(), format!("stopped: {reason}"));
                self.tell_all(&directive, out);
                self.end(now, End::Stopped(self.progress.committed, reason), out);
            } else {
                self.tell_all(&Directive::Stop(reason.clone()), out);
                self.say(Reason::StopAsked(reason), out);
            }
        }
        Ok(Reply::Phase(self.run_phase()))
    }

    pub(super) fn refresh_memory(&mut self, now: Timestamp, ticket: Ticket, out: &mut Vec<Action>) {
        if !matches!(self.phase, Phase::Running(_)) {
            return out.push(Action::Reply(ticket, Ok(Reply::Memory(self.memory_table()))));
        }
        self.orders.memory_reports = self.orders.memory_reports.saturating_add(1);
        self.tell_all(&Directive::MemoryReport(self.orders.memory_reports), out);
        let present = self.roster.workers().filter(|worker| worker.gone.is_none());
        self.refreshes.push(Refresh {
            ticket,
            missing: present.map(|worker| worker.claim.rank).collect(),
            deadline: now.after(limits::MEMORY_REFRESH_TIMEOUT),
        });
    }

    /// Answers those whose reports are all in, or whose time is up.
    pub(super) fn finish_refreshes(&mut self, now: Timestamp, out: &mut Vec<Action>) {
        let ready = |refresh: &Refresh| refresh.missing.is_empty() || refresh.deadline <= now;
        let (ready, waiting): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.refreshes).into_iter().partition(ready);
        self.refreshes = waiting;
        self.answer(&ready, out);
    }

    /// Answers everyone: no further report will come.
    pub(super) fn finish_all_refreshes(&mut self, out: &mut Vec<Action>) {
        let ready = std::mem::take(&mut self.refreshes);
        self.answer(&ready, out);
    }

    pub(super) fn memory_table(&self) -> Arc<Vec<RankMemory>> {
        let table = self.roster.workers().map(|worker| RankMemory {
            rank: worker.claim.rank,
            host: worker.claim.host.clone(),
            phases: self.memory.phases(worker.claim.rank),
        });
        Arc::new(table.collect())
    }

    pub(super) fn status(&self, now: Timestamp) -> Status {
        let committed = self.progress.committed;
        let left = self.plan.map(|plan| plan.total_steps().saturating_sub(committed.0));
        Status {
            phase: self.run_phase(),
            reason: self.reason.clone(),
            generation: self.generation_now(),
            world: self.config.world.size(),
            committed,
            total: self.plan.map(|plan| plan.total_steps()),
            epoch: self.plan.map_or(0, |plan| plan.epoch(committed)),
            last: self.progress.last.clone(),
            eta: left.and_then(|steps| self.progress.pace.time_for(steps)),
            ranks: self.rank_statuses(now),
            checkpoints: self.checkpoints.newest(limits::MAX_LISTED_CHECKPOINTS),
            failure: match &self.phase {
                Phase::Over(over) => match &over.end {
                    End::Failed(failure) => Some(failure.clone()),
                    End::Finished(_) | End::Stopped(..) => None,
                },
                _ => None,
            },
        }
    }

    fn rank_statuses(&self, now: Timestamp) -> Vec<RankStatus> {
        let (lease_first, lease_end) = self.lease();
        let statuses = self.roster.workers().map(|worker| RankStatus {
            rank: worker.claim.rank,
            worker: worker.id,
            host: worker.claim.host.clone(),
            pid: worker.claim.pid,
            node_rank: worker.claim.node_rank,
            local_rank: worker.claim.local_rank,
            device: worker.claim.device.clone(),
            phase: worker.phase,
            step: worker.step,
            silent: now.since(worker.last_seen),
            lease_first,
            lease_end,
            times: worker.times,
            memory_peak: self.memory.peak(worker.claim.rank),
        });
        statuses.collect()
    }

    fn answer(&self, ready: &[Refresh], out: &mut Vec<Action>) {
        if ready.is_empty() {
            return;
        }
        let table = self.memory_table();
        out.push(Action::Publish(News::Memory(table.clone())));
        out.extend(
            ready.iter().map(|refresh| Action::Reply(refresh.ticket, Ok(Reply::Memory(table.clone())))),
        );
    }

    /// Steps that ranks may run now: from here, up to here.
    fn lease(&self) -> (Step, Step) {
        let committed = self.progress.committed;
        match &self.phase {
            Phase::Running(running) => (committed, running.leases.end().max(committed)),
            _ => (committed, committed),
        }
    }

    fn training(&self) -> bool {
        matches!(self.phase, Phase::Running(_)) && self.reason != Reason::StepsDone
    }

    fn must_go_on(&self) -> Result<(), Refusal> {
        match self.phase {
            Phase::Searching(_) | Phase::Over(_) => Err(Refusal::Over(self.reason.clone())),
            Phase::Gathering(_) | Phase::Running(_) => Ok(()),
        }
    }
}
