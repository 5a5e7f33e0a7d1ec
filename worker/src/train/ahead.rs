//! Which samples this rank consumes in the next steps: leased, and asked of the data threads, a few steps ahead.
//!
//! Requests stop before a step whose turn is not known yet: where drift is measured first. A generation of kept features that begins ahead has no
//! name yet, which is a digest of the adapter as the step before leaves it: its samples are requested with their images.

use std::ops::Range;

use coxswain_proto::{ids::Step, limits::LEASE_STEPS};

use super::{TrainError, features::Claim, training::Training};
use crate::feeder::StepRequest;
use coxswain_nn::kernels::Tape;

/// Steps whose samples are requested ahead of the one that runs, so that data threads never wait for a lease. More where an encoder batch
/// reaches further.
const REQUESTS_AHEAD: u64 = 4;

impl<B: Tape<Base = B>> Training<'_, B> {
    /// Leases the next steps' samples and puts the data threads to work on them.
    pub(super) fn request_ahead(&mut self, total: Step) -> Result<(), TrainError> {
        let until = Step((self.next.0 + 1 + self.steps_ahead()).min(total.0));
        while self.feed.requested < until {
            let step = self.feed.requested;
            let batch = self.run.plan.batch(step);
            let leased = match step == self.next {
                true => self.lease_next(batch.len())?,
                false if self.measures_before(step) => break,
                false => match self.members.link.lease_ahead(step, batch.len())? {
                    Some(leased) => leased,
                    None => break,
                },
            };
            let Some(kept) = self.source(&leased.turn) else { break };
            let begin = batch.positions.start;
            let positions = self.usable(batch.epoch, begin + leased.slice.start..begin + leased.slice.end);
            self.feed.claimed.push_back(Claim { positions: positions.clone(), turn: leased.turn });
            let (epoch, micro_batch) = (batch.epoch, self.feed.micro_batch);
            self.feed.prefetch.request(StepRequest { step, epoch, positions, micro_batch, kept })?;
            self.feed.requested = Step(step.0 + 1);
        }
        // A step that was requested ahead takes its turn when it is due.
        match self.feed.claimed.front().map(|claim| claim.turn.clone()) {
            Some(turn) => self.take_turn(&turn),
            None => Ok(()),
        }
    }

    /// Steps after the next one whose samples are asked for.
    fn steps_ahead(&self) -> u64 {
        let share =
            self.run.plan.batch(self.next).len().div_ceil(u64::from(self.members.world().max(1))).max(1);
        let wanted = self.features.as_ref().map_or(0, |features| features.encoder_batch() as u64);
        wanted.div_ceil(share).clamp(REQUESTS_AHEAD, LEASE_STEPS)
    }

    /// These positions without those whose samples are left out.
    pub(super) fn usable(&self, epoch: u64, positions: Range<u64>) -> Vec<Range<u64>> {
        let quarantined = &self.members.assignment.quarantined;
        self.feed.usable(self.run.spec.run.seed, quarantined, epoch, positions)
    }
}
