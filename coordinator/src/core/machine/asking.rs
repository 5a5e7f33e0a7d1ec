//! What people ask of a run.

use std::{collections::BTreeMap, sync::Arc};

use coxswain_proto::{
    ids::{Step, WorkerId},
    limits,
};

use super::{Machine, Refresh, Refusal, Reply, Ticket, Timestamp};
use crate::core::{
    action::{Action, Directive},
    failure::Failure,
    memory::RankMemory,
    motion::Member,
    news::News,
    phase::{End, Phase},
    reason::Reason,
    roster::Worker,
    status::{LeavingNode, Occupant, RankStatus, Status, WorkerStatus},
};

impl Machine {
    pub(super) fn pause(&mut self, out: &mut Vec<Action>) -> Result<Reply, Refusal> {
        self.must_go_on()?;
        if !self.orders.pause && self.orders.stop.is_none() {
            self.order(|orders| orders.pause = true, out);
            self.tell_all(&Directive::Pause, out);
            if self.training() {
                self.say(Reason::Pausing, out);
            }
        }
        Ok(Reply::Phase(self.run_phase()))
    }

    pub(super) fn resume(&mut self, out: &mut Vec<Action>) -> Result<Reply, Refusal> {
        self.must_go_on()?;
        // Whoever goes on already is not disturbed, and whoever missed it goes on now.
        self.tell_all(&Directive::Resume, out);
        if self.orders.pause {
            self.order(|orders| orders.pause = false, out);
            if self.training() {
                self.say(Reason::Resumed, out);
            }
        }
        Ok(Reply::Phase(self.run_phase()))
    }

    pub(super) fn checkpoint_now(&mut self, out: &mut Vec<Action>) -> Result<Reply, Refusal> {
        self.must_go_on()?;
        // One that was asked for and is not written yet is the same.
        if self.orders.checkpoint_due.is_none() {
            let due = Some(self.progress.committed);
            self.order(
                |orders| {
                    (orders.checkpoints, orders.checkpoint_due) = (orders.checkpoints.saturating_add(1), due);
                },
                out,
            );
        }
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
            self.order(|orders| orders.stop = Some(reason.clone()), out);
            match &self.phase {
                // Nothing has been trained, or all is lost but the checkpoints: nothing to save.
                Phase::Gathering(gathering) if gathering.earlier.is_none() => {
                    self.end(now, End::Stopped(self.progress.committed, reason), out);
                }
                Phase::Gathering(_) => self.tell_all(&Directive::Stop(reason), out),
                _ => {
                    self.tell_all(&Directive::Stop(reason.clone()), out);
                    self.say(Reason::StopAsked(reason), out);
                }
            }
        }
        Ok(Reply::Phase(self.run_phase()))
    }

    pub(super) fn refresh_memory(&mut self, now: Timestamp, ticket: Ticket, out: &mut Vec<Action>) {
        if !matches!(self.phase, Phase::Running(_)) {
            return out.push(Action::Reply(ticket, Ok(Reply::Memory(self.memory_table()))));
        }
        self.order(|orders| orders.memory_reports = orders.memory_reports.saturating_add(1), out);
        self.tell_all(&Directive::MemoryReport(self.orders.memory_reports), out);
        let present = self.roster.living();
        self.refreshes.push(Refresh {
            ticket,
            missing: present.map(|worker| worker.seat()).collect(),
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
            seat: worker.seat(),
            host: worker.claim.host.clone(),
            phases: self.memory.phases(worker.seat()),
            comparison: self.memory.comparison(worker.seat()),
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
            present: self.roster.present(),
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
                    End::Finished(_) | End::Stopped(..) => self.survived.clone(),
                },
                Phase::Gathering(_) | Phase::Running(_) => self.newest_fault(),
            },
            spent: self.spent.clone(),
            max_restarts: self.config.budgets.restarts,
            sizes: self.plan.map(|plan| (plan.samples(), plan.global_batch())),
            cache: self.cache_status(),
            leaving: self.leaving(),
        }
    }

    /// A row for each seat that somebody has, had, or is on the way to, in seat order.
    fn rank_statuses(&self, now: Timestamp) -> Vec<RankStatus> {
        let starting: BTreeMap<_, _> =
            self.on_their_way(now).map(|start| (start.seat, self.starting_status(&start))).collect();
        let there = self.roster.workers().filter(|worker| !starting.contains_key(&worker.seat()));
        let mut ranks: BTreeMap<_, _> =
            there.map(|worker| (worker.seat(), self.worker_status(now, worker))).collect();
        ranks.extend(starting);
        ranks.into_values().collect()
    }

    fn starting_status(&self, start: &Member) -> RankStatus {
        let world = self.config.world;
        let node_rank = world.node_of(start.seat);
        RankStatus {
            seat: start.seat,
            host: self.nodes.at(node_rank).map_or_else(String::new, |node| node.host.clone()),
            node_rank,
            local_rank: start.seat.0 % world.nproc_per_node,
            silent: start.pulse.still,
            occupant: Occupant::Starting,
        }
    }

    fn worker_status(&self, now: Timestamp, worker: &Worker) -> RankStatus {
        RankStatus {
            seat: worker.seat(),
            host: worker.claim.host.clone(),
            node_rank: worker.claim.node_rank,
            local_rank: worker.claim.local_rank,
            silent: now.since(worker.last_seen),
            occupant: Occupant::Worker(WorkerStatus {
                worker: worker.id,
                gone: worker.gone.is_some(),
                pid: worker.claim.pid,
                device: worker.claim.device.clone(),
                phase: worker.phase,
                step: worker.step,
                lease_first: self.progress.committed,
                lease_end: self.lease_end(worker.id),
                times: worker.times,
                metrics: worker.metrics.clone(),
                memory_peak: self.memory.peak(worker.seat()),
            }),
        }
    }

    fn leaving(&self) -> Vec<LeavingNode> {
        let leaving = self.orders.draining.iter().filter_map(|place| {
            let node = self.nodes.at(*place)?;
            let seats = self.config.world.seats_of(*place);
            let workers = seats.filter(|seat| self.roster.living_at(*seat).is_some()).count() as u32;
            let (node_id, host) = (node.node_id.clone(), node.host.clone());
            Some(LeavingNode { place: *place, node_id, host, workers })
        });
        leaving.collect()
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

    /// The first step that a worker may not run now.
    fn lease_end(&self, worker: WorkerId) -> Step {
        let held = match &self.phase {
            Phase::Running(running) => running.training().and_then(|training| {
                Some(training.course.leases.end_of(training.course.ledger.rank_of(worker)?))
            }),
            Phase::Gathering(_) | Phase::Over(_) => None,
        };
        held.unwrap_or_default().max(self.progress.committed)
    }

    /// The fault that is being dealt with, or else the newest one that was.
    fn newest_fault(&self) -> Option<Arc<Failure>> {
        let open = self.incident.as_ref().and_then(|incident| {
            let mut failure = (**incident.cause.as_ref()?).clone();
            failure.victims.clone_from(&incident.victims);
            Some(Arc::new(failure))
        });
        open.or_else(|| self.survived.clone())
    }

    fn training(&self) -> bool {
        matches!(&self.phase, Phase::Running(running) if running.training().is_some())
            && self.reason != Reason::StepsDone
    }

    pub(super) fn must_go_on(&self) -> Result<(), Refusal> {
        match self.phase {
            Phase::Over(_) => Err(Refusal::Over(self.reason.clone())),
            Phase::Gathering(_) | Phase::Running(_) => Ok(()),
        }
    }
}
