//! Samples that failed on workers that are well.

use std::sync::Arc;

use coxswain_proto::ids::WorkerId;

use super::{Machine, Refusal, Reply, Timestamp};
use crate::core::{
    action::{Action, Record},
    failure::{Failure, Incident},
    news::News,
    phase::Phase,
    quarantine::{EpochPositions, Verdict},
};

impl Machine {
    /// The generation ends, and in the next one another worker tries the sample, or nobody. Costs nothing of the budget for faults:
    /// the quarantine has its own.
    pub(super) fn failed_sample(
        &mut self,
        now: Timestamp,
        id: WorkerId,
        (at, mut failure): (EpochPositions, Failure),
        out: &mut Vec<Action>,
    ) -> Result<Reply, Refusal> {
        let worker = self.roster.living_mut(id)?;
        worker.last_seen = now;
        let seat = worker.seat();
        let stale = match &self.phase {
            Phase::Running(running) => running.rank_of(id).is_none(),
            Phase::Gathering(_) => false,
            Phase::Over(_) => true,
        };
        let known = self.quarantine.left_out().any(|other| *other == at);
        // The generation has ended for this very sample: the worker says it again because our answer was lost.
        let again = matches!(self.phase, Phase::Gathering(_))
            && self.incident.as_ref().is_some_and(|incident| incident.sample.as_ref() == Some(&at));
        if stale || known || again {
            return Ok(Reply::Done);
        }
        failure.seat = Some(seat);
        failure.generation = self.generation_now();
        let verdict = self.quarantine.failed(at.clone(), seat, self.workers_now());
        out.push(Action::Record(Record::Quarantine(self.quarantine.clone())));
        let failure = Arc::new(failure);
        out.push(Action::Publish(News::Sample(at.clone(), verdict, failure.clone())));
        if matches!(verdict, Verdict::TooMany | Verdict::WorkerAtFault) {
            self.fatal(now, (*failure).clone(), out);
            return Ok(Reply::Done);
        }
        let incident = self.incident.get_or_insert_with(|| Incident::new(now));
        incident.sample = Some(at.clone());
        incident.victims.remove(&seat);
        self.break_up(now, &format!("{at} failed on rank {seat}"), true, out);
        Ok(Reply::Done)
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
