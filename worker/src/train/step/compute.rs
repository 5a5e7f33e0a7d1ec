//! What a step computes: passes of the task, guarded against memory that runs out, and the update; or
//! nothing, where all leave it out.

use coxswain_nn::kernels::{Tape, free_broken_off};
use coxswain_proto::{ids::Step, report::SkipCause};
use coxswain_task::{Batch, MicroLoss, Pass, StageClock};

use super::{
    tally::{Norms, TimeBreakdown},
    vote::{Lookout, Verdict},
};
use crate::train::{Learner, TrainError, Workbench};
use crate::{
    clock,
    link::{Phase, StepTimes},
    memory::{self, Attempt, GuardedError},
    zero::StepInput,
};

impl<B: Tape<Base = B>> Workbench<'_, B> {
    /// One micro-batch forward and backward, as far as memory goes, given up as soon as this lookout sees
    /// that another rank's attempt is lost. Everything it held is free again when this returns.
    pub(in crate::train) fn pass(
        &mut self,
        lookout: Lookout,
        step: Step,
        micro_batch: &dyn Batch,
        spent: &mut TimeBreakdown,
    ) -> Result<MicroLoss, TrainError> {
        let does_not_fit = |source| TrainError::DoesNotFit { step, source };
        let attempt = Attempt {
            rank: self.members.rank(),
            step,
            samples: micro_batch.len(),
            cells: micro_batch.cells(),
            divisible: self.feed.micro_batch > 1,
            representative: micro_batch.features().is_none() || self.resting().is_none(),
        };
        self.stats.meter.expect(attempt).map_err(does_not_fit)?;
        let before = self.stats.meter.in_use();
        let Learner { objective, trainables, grads, .. } = &mut self.learner;
        let (meter, link) = (&mut self.stats.meter, &mut self.members.link);
        let mut clock = StageClock::new(|pass| {
            let phase = match pass {
                Pass::Forward => Phase::Forward,
                Pass::Backward => Phase::Backward,
            };
            link.at(phase, step);
            // Fails after loading only.
            let _ = meter.enter(phase);
        });
        let outcome = memory::guarded_unless(
            move || lookout.sees_loss(),
            || {
                let loss = objective.forward_backward(trainables, micro_batch, grads, &mut clock);
                // A device reports what it could not do only when its queue is handed over; gradients that it
                // did not make look like any others. Nobody waits for them here.
                (loss, B::flush(&trainables.device()))
            },
        );
        // Also a task that finds its loss not finite has recorded what it does not run backward.
        if !matches!(outcome, Ok((Ok(_), _))) {
            free_broken_off::<B>(&self.learner.trainables.device());
        }
        let (stages, figures) = clock.into_parts();
        spent.stages.extend(&stages);
        spent.figures.extend(figures);
        self.enter(Phase::Data, step)?;
        let (loss, overrun) = match outcome {
            Ok(loss) => (Some(loss), None),
            Err(GuardedError::OutOfMemory(overrun)) => (None, Some(overrun)),
            Err(GuardedError::CalledOff) => {
                self.stats.meter.given_up().map_err(does_not_fit)?;
                return Err(TrainError::CalledOff);
            }
        };
        self.stats.meter.passed(before.0, overrun).map_err(does_not_fit)?;
        let (loss, settled) = loss.expect("a pass without a loss has overrun");
        settled.map_err(|error| TrainError::Device { step, detail: error.to_string() })?;
        Ok(loss?)
    }

    /// Takes the next step, in which all ranks are well. Also returns what broke after this rank had taken
    /// it.
    pub(super) fn commit(
        &mut self,
        verdict: &Verdict,
        times: &mut StepTimes,
    ) -> Result<(Norms, Option<TrainError>), TrainError> {
        let step = self.next;
        self.with_features(|features, desk| features.settle_epoch(desk, step))?;
        let entered = self.enter(Phase::Optimizer, step);
        let scale = 1.0 / verdict.valid_count.max(1.0);
        let input = StepInput { scale, rates: self.learner.rates.rates(step.0), resting: self.resting() };
        match entered.and_then(|()| self.update(&input, times)) {
            Ok(norms) => Ok((norms, None)),
            Err(error @ TrainError::Device { .. }) => Err(error),
            Err(error) => {
                let held = self.learner.held.as_ref();
                match held.filter(|held| held.optimizer.versions().0.newest > step.0) {
                    Some(held) => {
                        let norms = Norms { all: held.optimizer.last_norm(), groups: Vec::new() };
                        Ok((norms, Some(error)))
                    }
                    None => Err(error),
                }
            }
        }
    }

    /// Reduce, clip, AdamW on this rank's shard, gather.
    fn update(&mut self, input: &StepInput, times: &mut StepTimes) -> Result<Norms, TrainError> {
        let (learner, members) = (&mut self.learner, &mut self.members);
        let (updating, busy) = (clock::now(), members.communicating());
        let mut weights: B::Flat = learner.trainables.take();
        let held = learner.held.as_mut().expect("a generation begins with a state");
        let grads = learner.grads.values_but(input.resting, learner.trainables.layout());
        let outcome = held.optimizer.step(grads, &mut weights, input, members.comm.as_mut());
        learner.trainables.put(weights);
        let communication = members.communicating() - busy;
        times.communication += communication;
        times.optimizer += updating.elapsed().saturating_sub(communication);
        // Refused here, memory is missing in the middle of a step that others may have taken: what this rank
        // holds is not to be trusted, and its part is its replica's to give.
        match memory::refused() {
            Some(detail) => Err(TrainError::Device { step: self.next, detail }),
            None => {
                let outcome = outcome?;
                Ok(Norms { all: outcome.grad_norm, groups: outcome.group_norms })
            }
        }
    }

    /// All ranks leave the next step out, after what ends with it whether or not it counts.
    pub(super) fn leave_out(&mut self, cause: SkipCause) -> Result<(), TrainError> {
        let step = self.next;
        self.with_features(|features, desk| features.settle_epoch(desk, step))?;
        let held = self.learner.held.as_mut().expect("a generation begins with a state");
        held.optimizer.skip(cause == SkipCause::Overflow);
        Ok(())
    }
}
