//! Which samples this rank consumes in the next steps: leased, and asked of the data threads a few steps
//! ahead.
//!
//! Requests stop before a step whose cache phase is not known yet: where drift is measured first. A
//! generation of kept features that begins ahead has no name yet, which is a digest of the adapter as the
//! step before leaves it: its samples are requested with their images.

use coxswain_nn::kernels::Tape;
use coxswain_proto::{ids::Step, limits::LEASE_STEPS};

use crate::train::{Claim, Features, TrainError, Workbench};
use crate::{feeder::StepRequest, link::StepShare};

/// Steps whose samples are requested ahead of the one that runs, so that data threads never wait for a lease.
/// More where an encoder batch reaches further.
const REQUESTS_AHEAD: u64 = 4;

impl<B: Tape<Base = B>> Workbench<'_, B> {
    /// Leases the next steps' samples and puts the data threads to work on them.
    pub(in crate::train) fn request_ahead(&mut self, total: Step) -> Result<(), TrainError> {
        let share = self.run.plan.batch(self.next).len().div_ceil(u64::from(self.members.world().max(1)));
        let at_once = self.features.as_ref().map_or(0, Features::encoder_batch) as u64;
        let until = Step((self.next.0 + 1 + steps_ahead(share, at_once)).min(total.0));
        while self.feed.requested < until {
            let step = self.feed.requested;
            let batch = self.run.plan.batch(step);
            let measures = |features: &Features<B>| features.measures_before(&self.run, step);
            let leased = match step == self.next {
                true => self.lease_next(batch.len())?,
                false if self.features.as_ref().is_some_and(measures) => break,
                false => match self.members.link.lease_ahead(step, batch.len())? {
                    Some(leased) => leased,
                    None => break,
                },
            };
            let source =
                |features: &Features<B>| features.source(&leased.cache_phase, self.next, &self.feed.claimed);
            let Some(kept) = self.features.as_ref().map_or(Some(None), source) else { break };
            let begin = batch.positions.start;
            let positions = self.feed.usable(
                self.run.spec.run.seed,
                &self.members.assignment.quarantined,
                batch.epoch,
                begin + leased.slice.start..begin + leased.slice.end,
            );
            self.feed
                .claimed
                .push_back(Claim { positions: positions.clone(), cache_phase: leased.cache_phase });
            let (epoch, micro_batch) = (batch.epoch, self.feed.micro_batch);
            self.feed.prefetch.request(StepRequest { step, epoch, positions, micro_batch, kept })?;
            self.feed.requested = Step(step.0 + 1);
        }
        // A step that was requested ahead takes its turn when it is due.
        match self.feed.claimed.front().map(|claim| claim.cache_phase.clone()) {
            Some(cache_phase) => {
                self.with_features(|features, desk| features.enter_cache_phase(desk, &cache_phase))
            }
            None => Ok(()),
        }
    }

    /// Leases the next step, after what has to be known for that.
    fn lease_next(&mut self, samples: u64) -> Result<StepShare, TrainError> {
        self.with_features(|features, desk| features.measure_before(desk))?;
        let leased = self.members.link.lease(self.next, samples)?;
        self.with_features(|features, desk| features.enter_cache_phase(desk, &leased.cache_phase))?;
        Ok(leased)
    }
}

/// Steps after the next one whose samples are asked for: `share` is what this rank takes of one, `at_once`
/// the samples whose features are computed together.
fn steps_ahead(share: u64, at_once: u64) -> u64 {
    at_once.div_ceil(share.max(1)).clamp(REQUESTS_AHEAD, LEASE_STEPS)
}
