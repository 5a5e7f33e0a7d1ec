//! Departures: failures and failed samples that workers report, good-byes, and processes that end without a
//! word.

use std::sync::Arc;

use coxswain_proto::ids::{Slot, WorkerId};

use super::{
    losing::{self, Loss},
    run::Run,
    transitions,
};
use crate::{
    core::{
        action::{Action, Record, Reply},
        event::{KillingSample, ProcessExit},
        failure::Failure,
        news::{MemberChange, News},
        phase::Phase,
        quarantine::{BadSample, SampleVerdict, Try},
        refusal::Refusal,
    },
    options::CauseKind,
};

/// The run, seen by a worker or launcher that goes.
pub(super) struct Departures<'a> {
    pub(super) run: &'a mut Run,
}

impl Departures<'_> {
    /// A launcher saw a process end. News only if its worker has not said why.
    pub(super) fn exited(
        &mut self,
        node_id: &str,
        slot: Slot,
        pid: Option<u32>,
        ended: ProcessExit,
        sample: Option<KillingSample>,
    ) -> Result<Reply, Refusal> {
        let (world, run) = (self.run.config.world, &mut *self.run);
        let (place, _) = run.fleet.nodes.find(node_id)?;
        if slot.0 >= world.size() {
            return Err(Refusal::RankOutside { slot, world: world.size() });
        }
        if world.node_of(slot) != place {
            return Err(Refusal::RankElsewhere { slot, place });
        }
        let let_in = run.fleet.roster.living_at(slot).is_some() || !run.health.is_cordoned(slot);
        if run.fleet.exited(run.now, slot, pid) && let_in {
            // The exit codes of this program: the same configuration or data would end the next process, too.
            let kind = match ended {
                ProcessExit::Code(2 | 3) => CauseKind::BadInput,
                ProcessExit::Code(5) => CauseKind::OutOfMemory,
                // Its successor has all ranks take half as many samples at a time.
                ProcessExit::OutOfMemory => CauseKind::KilledForMemory,
                _ => CauseKind::WorkerLost,
            };
            let told = run.fleet.roster.take_unheard(slot);
            let failure = told.unwrap_or_else(|| run.failure_of(slot, kind, ended.to_string()));
            match sample.filter(|_| ended.may_be_of_a_sample()) {
                Some(sample) => self.killed_by(slot, sample, failure),
                None => run.lose(slot, failure),
            }
            self.run.try_form();
        }
        Ok(Reply::Done)
    }

    /// A sample has ended the process that read it: the worker is lost, at the quarantine's cost, and in the
    /// next generation another worker tries the sample, or it is left out.
    fn killed_by(&mut self, slot: Slot, killing: KillingSample, mut failure: Failure) {
        let run = &mut *self.run;
        let KillingSample { sample, generation } = killing;
        let workers = match &run.phase {
            Phase::Running(running) => running.assignment.world(),
            Phase::Gathering(_) | Phase::Over(_) => run.config.world.most(),
        };
        let theirs = run.fleet.roster.at(slot).is_some_and(|worker| worker.generation == generation);
        let breaks = losing::judge(run, slot, failure.kind) == Loss::Breaks;
        let killed = Try { sample, slot, generation };
        let verdict = match theirs && breaks {
            true => run.progress.quarantine.killed(killed, workers),
            false => None,
        };
        let Some(verdict) = verdict else { return run.lose(slot, failure) };
        failure.message = format!("{} while it read this sample", failure.message);
        run.out.push(Action::Record(Record::Quarantine(run.progress.quarantine.clone())));
        run.publish(News::Sample(sample, verdict, Arc::new(failure.clone())));
        if matches!(verdict, SampleVerdict::TooMany | SampleVerdict::WorkerAtFault) {
            run.fleet.lose(slot, &mut run.out);
            return transitions::close(run, failure);
        }
        run.lose_to(slot, failure, Some(sample));
    }

    /// A failure that a worker reports of itself.
    pub(super) fn reported_failure(&mut self, id: WorkerId, mut failure: Failure) -> Result<Reply, Refusal> {
        let run = &mut *self.run;
        let mut worker = run.fleet.roster.get_mut(id)?;
        worker.last_seen = run.now;
        if worker.gone.is_some() {
            return Ok(Reply::Done);
        }
        let slot = worker.slot();
        failure.slot = Some(slot);
        failure.host.clone_from(&worker.claim.host);
        drop(worker);
        let closing = run.faults.closing().is_some();
        if !closing && losing::is_final(run, failure.kind, run.is_member(slot)) {
            // It has its good-byes to say.
            transitions::end_for(run, failure);
        } else {
            run.lose(slot, failure);
            run.try_form();
        }
        Ok(Reply::Done)
    }

    /// A process fails before it has a slot.
    pub(super) fn failed_unregistered(&mut self, failure: Failure) -> Reply {
        let run = &mut *self.run;
        if losing::is_final(run, failure.kind, false) {
            run.fatal(failure);
            return Reply::Done;
        }
        run.publish(News::Consequence(failure.clone().into()));
        if let Some(slot) = failure.slot {
            // Its launcher will say that the process has ended.
            run.fleet.roster.note_unheard(slot, failure);
        }
        Reply::Done
    }

    /// A sample failed on a worker that is well: the generation ends, and in the next one another worker
    /// tries it, or it is left out. Costs nothing of the budget for faults: the quarantine has its own. A
    /// worker that had no answer says it again, and nothing more follows.
    pub(super) fn failed_sample(
        &mut self,
        id: WorkerId,
        sample: BadSample,
        mut failure: Failure,
    ) -> Result<Reply, Refusal> {
        let run = &mut *self.run;
        let slot = run.fleet.seen(run.now, id)?.slot();
        // Workers that can try it: those of the generation, or those that the next one will have.
        let (stale, workers) = match &run.phase {
            Phase::Running(running) => {
                let theirs = running.assignment.generation != failure.generation;
                (theirs || running.rank_of(id).is_none(), running.assignment.world())
            }
            Phase::Gathering(_) if run.config.world.elastic() => {
                (false, run.fleet.roster.present().min(run.config.world.most()))
            }
            Phase::Gathering(_) => (false, run.config.world.size()),
            Phase::Over(_) => (true, 0),
        };
        let failed = Try { sample, slot, generation: failure.generation };
        let verdict = if stale { None } else { run.progress.quarantine.failed(failed, workers) };
        let Some(verdict) = verdict else { return Ok(Reply::Done) };
        failure.slot = Some(slot);
        run.out.push(Action::Record(Record::Quarantine(run.progress.quarantine.clone())));
        run.publish(News::Sample(sample, verdict, Arc::new(failure.clone())));
        if matches!(verdict, SampleVerdict::TooMany | SampleVerdict::WorkerAtFault) {
            transitions::close(run, failure);
            return Ok(Reply::Done);
        }
        let incident = run.faults.incident(run.now);
        incident.sample = Some(sample);
        incident.victims.remove(&slot);
        run.break_up(&format!("{sample} failed on rank {slot}"), true);
        Ok(Reply::Done)
    }

    /// A worker's last word.
    pub(super) fn leave(&mut self, id: WorkerId, exit_code: i32, reason: String) -> Result<Reply, Refusal> {
        let run = &mut *self.run;
        let mut worker = run.fleet.roster.get_mut(id)?;
        worker.last_seen = run.now;
        if worker.gone.is_some() {
            return Ok(Reply::Done);
        }
        let slot = worker.slot();
        drop(worker);
        run.fleet.leave(slot, exit_code, &mut run.out);
        run.announce(MemberChange::Left { slot, exit_code, reason: reason.clone() });
        if exit_code == 0 && run.orders.stop.is_none() {
            let before = run.progress.committed;
            run.progress.settle_all(id, &mut run.out);
            if run.progress.committed > before {
                run.faults.got_on(&mut run.out);
            }
        }
        let at_the_end = exit_code == 0 && run.at_the_end();
        let in_order = match &run.phase {
            Phase::Gathering(_) if at_the_end && !run.drained(slot) => {
                // No worker leaves in order before the results are on disk, whatever ended the generation
                // after that.
                run.end(run.end_in_order());
                return Ok(Reply::Done);
            }
            Phase::Gathering(_) => false,
            Phase::Running(_) => at_the_end && run.faults.closing().is_none(),
            Phase::Over(_) => true,
        };
        if in_order {
            run.trust_good_bye(slot);
            run.finish();
        } else if exit_code == 0 && run.drained(slot) && !run.is_member(slot) {
            // It was to go.
        } else if exit_code == 0 && run.config.world.elastic() {
            run.shrink(slot, &reason);
        } else {
            let message = format!("left before the end of the run: {reason}");
            run.lose_silently(slot, message);
        }
        run.try_form();
        Ok(Reply::Done)
    }
}
