//! Samples that failed on workers that are well.

use std::sync::Arc;

use coxswain_proto::{
    ids::WorkerId,
    order::{LeftOut, Order},
};

use super::{Machine, Refusal, Reply, Timestamp};
use crate::core::{
    action::{Action, Record},
    failure::{Failure, Incident},
    news::News,
    phase::Phase,
    quarantine::{BadSample, Verdict},
};

impl Machine {
    /// The generation ends, and in the next one another worker tries the sample, or nobody. Costs nothing of the budget for faults:
    /// the quarantine has its own. A worker that had no answer says it again, and nothing more follows.
    pub(super) fn failed_sample(
        &mut self,
        now: Timestamp,
        id: WorkerId,
        (sample, mut failure): (BadSample, Failure),
        out: &mut Vec<Action>,
    ) -> Result<Reply, Refusal> {
        let worker = self.roster.living_mut(id)?;
        worker.last_seen = now;
        let seat = worker.seat();
        let stale = match &self.phase {
            Phase::Running(running) => {
                running.rank_of(id).is_none() || running.assignment.generation != failure.generation
            }
            Phase::Gathering(_) => false,
            Phase::Over(_) => true,
        };
        if stale {
            return Ok(Reply::Done);
        }
        let (said_in, workers) = (failure.generation, self.workers_now());
        let Some(verdict) = self.quarantine.failed(sample, (seat, said_in), workers) else {
            return Ok(Reply::Done);
        };
        failure.seat = Some(seat);
        out.push(Action::Record(Record::Quarantine(self.quarantine.clone())));
        let failure = Arc::new(failure);
        out.push(Action::Publish(News::Sample(sample, verdict, failure.clone())));
        if matches!(verdict, Verdict::TooMany | Verdict::WorkerAtFault) {
            self.fatal(now, (*failure).clone(), out);
            return Ok(Reply::Done);
        }
        let incident = self.incident.get_or_insert_with(|| Incident::new(now));
        incident.sample = Some(sample);
        incident.victims.remove(&seat);
        self.break_up(now, &format!("{sample} failed on rank {seat}"), true, out);
        Ok(Reply::Done)
    }

    /// Positions that nobody consumes, in this run's order.
    pub(super) fn left_out(&self) -> LeftOut {
        let dataset = self.dataset.as_ref().map(|(dataset, _)| dataset);
        let order = dataset.map(|of| Order::new(self.config.seed, of.order_key, of.training_samples));
        order.map(|order| self.quarantine.positions(order)).unwrap_or_default()
    }

    /// Workers that can try a sample: those of the generation, or those that the next one will have.
    fn workers_now(&self) -> u32 {
        match &self.phase {
            Phase::Running(running) => running.assignment.world(),
            Phase::Gathering(_) | Phase::Over(_) if self.config.world.elastic() => {
                self.roster.living().count() as u32
            }
            Phase::Gathering(_) | Phase::Over(_) => self.config.world.size(),
        }
    }
}
