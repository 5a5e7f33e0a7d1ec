//! Failures and farewells: who went, why, and whether that ends the run.

use coxswain_proto::ids::{Rank, WorkerId};

use super::{Machine, Refusal, Reply, Timestamp};
use crate::{
    core::{
        action::{Action, MemberChange},
        event::Ended,
        failure::Failure,
        phase::{End, Phase},
        roster::{Gone, Worker},
    },
    options::CauseKind,
};

impl Machine {
    pub(super) fn reported_failure(
        &mut self,
        now: Timestamp,
        id: Option<WorkerId>,
        mut failure: Failure,
        out: &mut Vec<Action>,
    ) -> Result<Reply, Refusal> {
        if let Some(id) = id {
            let worker = self.roster.get_mut(id)?;
            worker.last_seen = now;
            failure.rank = Some(worker.claim.rank);
            failure.host.clone_from(&worker.claim.host);
            if std::mem::replace(&mut worker.failed, true) {
                return Ok(Reply::Done);
            }
        }
        self.fail(now, failure, out);
        Ok(Reply::Done)
    }

    pub(super) fn leave(
        &mut self,
        now: Timestamp,
        id: WorkerId,
        exit_code: i32,
        reason: String,
        out: &mut Vec<Action>,
    ) -> Result<Reply, Refusal> {
        let worker = self.roster.get_mut(id)?;
        worker.last_seen = now;
        if worker.gone.replace(Gone::Left(exit_code)).is_some() {
            return Ok(Reply::Done);
        }
        if let Some(line) = worker.line.take() {
            out.push(Action::Close(line));
        }
        let rank = worker.claim.rank;
        self.announce(MemberChange::Left { rank, exit_code, reason: reason.clone() }, out);
        let early = match &self.phase {
            Phase::Gathering(_) => true,
            Phase::Running(running) => {
                exit_code != 0 || !(running.ledger.done() || self.orders.stop.is_some())
            }
            Phase::Searching(_) | Phase::Over(_) => false,
        };
        if early {
            let message = format!("left with exit code {exit_code} before the run was over: {reason}");
            self.fail_rank(now, rank, CauseKind::WorkerLost, message, out);
        } else {
            self.finish(now, out);
        }
        Ok(Reply::Done)
    }

    /// A launcher saw a process end. News only if its worker has not said why.
    pub(super) fn exited(
        &mut self,
        now: Timestamp,
        rank: Rank,
        ended: Ended,
        out: &mut Vec<Action>,
    ) -> Result<Reply, Refusal> {
        let world = self.config.world.size();
        if rank.0 >= world {
            return Err(Refusal::RankOutside { rank, world });
        }
        if let Some(id) = self.roster.at(rank).map(|worker| worker.id) {
            let worker = self.roster.get_mut(id)?;
            if worker.gone.replace(Gone::Lost).is_some() {
                return Ok(Reply::Done);
            }
            worker.line = None;
        }
        self.fail_rank(now, rank, CauseKind::WorkerLost, ended.to_string(), out);
        Ok(Reply::Done)
    }

    /// Every worker that has been silent for too long is gone; the first of them is a cause.
    pub(super) fn look_for_losses(&mut self, now: Timestamp, out: &mut Vec<Action>) {
        while let Some(lost) = self.roster.lost(now, &self.config.patience) {
            let (id, rank) = (lost.id, lost.claim.rank);
            let message = loss(lost, now);
            if let Ok(worker) = self.roster.get_mut(id) {
                worker.gone = Some(Gone::Lost);
                worker.line = None;
            }
            if !matches!(self.phase, Phase::Over(_)) {
                self.fail_rank(now, rank, CauseKind::WorkerLost, message, out);
            }
        }
        self.next_loss = self.roster.next_loss(&self.config.patience);
    }

    /// The rendezvous took too long.
    pub(super) fn rendezvous_failed(&self) -> Failure {
        let world = self.config.world.size();
        let missing: Vec<_> = (0..world).filter(|rank| self.roster.at(Rank(*rank)).is_none()).collect();
        let some: Vec<_> = missing.iter().take(8).map(u32::to_string).collect();
        let more = if missing.len() > some.len() { ", ..." } else { "" };
        let message = format!(
            "only {} of {world} workers came within {} s; missing ranks: {}{more}",
            self.roster.present(),
            self.config.patience.rendezvous.as_secs(),
            some.join(", "),
        );
        Failure::of_run(CauseKind::Rendezvous, message)
    }

    /// Running to Over, once every worker has left.
    fn finish(&mut self, now: Timestamp, out: &mut Vec<Action>) {
        if !matches!(self.phase, Phase::Running(_)) || !self.roster.all_gone() {
            return;
        }
        let steps = self.progress.committed;
        let end = match (&self.orders.stop, &self.phase) {
            (Some(reason), Phase::Running(running)) if !running.ledger.done() => {
                End::Stopped(steps, reason.clone())
            }
            _ => End::Finished(steps),
        };
        self.end(now, end, out);
    }

    fn fail_rank(
        &mut self,
        now: Timestamp,
        rank: Rank,
        kind: CauseKind,
        message: String,
        out: &mut Vec<Action>,
    ) {
        let mut failure = Failure::of_run(kind, message);
        failure.rank = Some(rank);
        failure.generation = self.generation_now();
        if let Some(worker) = self.roster.at(rank) {
            failure.host.clone_from(&worker.claim.host);
            failure.phase = worker.phase;
            failure.step = worker.step;
            failure.collective = worker.collective.0;
            failure.memory_in_use = worker.memory_in_use;
        }
        self.fail(now, failure, out);
    }
}

fn loss(worker: &Worker, now: Timestamp) -> String {
    let silent = now.since(worker.last_seen).as_secs_f64();
    match worker.line {
        Some(_) => format!("no sign of life for {silent:.1} s, though its line is open: it hangs"),
        None => format!("its line closed without a word, and no sign of life for {silent:.1} s"),
    }
}
