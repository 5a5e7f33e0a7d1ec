//! A step whose numbers are not finite: tried once more in its place, then left out.
//!
//! ```text
//! first attempt    a loss, or after the reduce-scatter the norm of the gradient, is infinite or NaN
//!                  Where weights or moments are not finite either, the run ends (`divergence`)
//! second attempt   the same samples, draws and micro-batches. What was a slip of the machine is well now,
//!                  and has the bits of a run without it. Each micro-batch's gradients are looked at, too, so
//!                  that the rank and the micro-batch are known
//! left out         not finite again: weights, moments and the optimizer's count of steps stay as they are,
//!                  and the rank whose micro-batch it was runs its samples one by one to name them
//! ```
//!
//! A loss is voted on before any gradient moves. The norm comes out of an all-reduce, the same on every rank,
//! before weights, moments or replica have changed, so that all come to one verdict without another vote.
//! The number of the step is used up: its place in the schedule of learning rates and in the order of samples
//! is, too, so that the steps behind it are those of a run that was told beforehand to leave it out
//! (`train.skip_steps`), bit for bit.
//!
//! A gradient that overflows because the loss is scaled is none of these: its step is left out at once, and
//! does not count among those in a row, as long as the scale can be lowered.
//!
//! What this does not do: look for numbers that are finite and wrong.

use coxswain_nn::kernels::{Tape, flat::Flat, free_broken_off};
use coxswain_proto::{
    ids::{Rank, Step},
    limits::MAX_SKIPPED_SAMPLES,
    report::{Skip, SkipCause},
};
use coxswain_task::{Batch, MicroLoss, StageClock};

use super::{tally::NonFiniteNumbers, transaction::Transaction};
use crate::train::{Learner, Members, TrainError};
use crate::{
    link::{Phase, Report},
    memory,
};

impl<B: Tape<Base = B>> Transaction<'_, '_, B> {
    /// What follows an attempt whose numbers are not finite: the same once more, or, the second time, why the
    /// step is left out. `error` is what this rank has found itself; none where others have.
    pub(super) fn doubt(
        &mut self,
        doubted: NonFiniteNumbers,
        error: Option<TrainError>,
    ) -> Result<Option<Skip>, TrainError> {
        if let Some(NonFiniteNumbers { cause, .. }) = self.doubt {
            let samples = self.blame(error.as_ref())?;
            return Ok(Some(Skip { cause, samples }));
        }
        let bench = &mut *self.bench;
        bench.require_sound()?;
        self.doubt = Some(doubted);
        if let Some(error) = error.filter(|_| bench.members.rank() == doubted.rank) {
            let line = format!("{error}. Step {} runs once more", self.step);
            bench.members.link.report(Report::Note(line))?;
        }
        self.recut()?;
        Ok(None)
    }

    /// Samples of the micro-batch that ran last, if it is to blame: those that are not finite by themselves,
    /// or all where none is. None where the norm alone is not finite, or another rank has the micro-batch.
    fn blame(&mut self, error: Option<&TrainError>) -> Result<Vec<u64>, TrainError> {
        let local = matches!(error, Some(TrainError::NotFinite { .. } | TrainError::Task(_)));
        let Some(last) = self.last.as_ref().filter(|_| local) else { return Ok(Vec::new()) };
        let all = last.batch.samples().iter().copied().take(MAX_SKIPPED_SAMPLES).collect::<Vec<_>>();
        if all.len() == 1 {
            return Ok(all);
        }
        let mut guilty = Vec::new();
        for &sample in &all {
            // A sign of motion for each, in a phase where it is known what a pass may take.
            self.bench.enter(Phase::Forward, self.step)?;
            if self.is_guilty(sample) {
                guilty.push(sample);
            }
        }
        self.bench.enter(Phase::Data, self.step)?;
        Ok(if guilty.is_empty() { all } else { guilty })
    }

    /// Whether a sample's loss or gradient is not finite where it is alone. One that cannot be run says
    /// nothing.
    fn is_guilty(&mut self, sample: u64) -> bool {
        let (step, bench) = (self.step, &mut *self.bench);
        let epoch = bench.run.plan.batch(step).epoch;
        let Ok(sample) = bench.feed.samples.read_in_epoch(sample, epoch) else { return false };
        let batch = bench.feed.samples.batch(step, &[sample]);
        let Learner { objective, trainables, grads, .. } = &mut bench.learner;
        grads.zero();
        let mut clock = StageClock::default();
        let run = || objective.forward_backward(trainables, &*batch, grads, &mut clock);
        let outcome = memory::guarded(run);
        if !matches!(outcome, Ok(Ok(_))) {
            free_broken_off::<B>(&bench.learner.trainables.device());
        }
        match outcome {
            Ok(Ok(loss)) => bench.learner.judge(step, &*batch, &loss, true).is_err(),
            Ok(Err(error)) => TrainError::Task(error).is_not_finite(),
            Err(_) => false,
        }
    }
}

impl NonFiniteNumbers {
    /// The second attempt was well.
    pub(super) fn tell_cleared(self, step: Step, members: &mut Members) -> Result<(), TrainError> {
        let known = self.cause == SkipCause::Loss;
        if members.rank() != if known { self.rank } else { Rank(0) } {
            return Ok(());
        }
        let what = if known { "loss" } else { "gradient" };
        let line = format!(
            "step {step}: the {what} is finite the second time, with the same samples and random numbers. \
             If this happens again, check the memory and the GPU of {}",
            if known { "this rank" } else { "the rank that reported it first" }
        );
        let told = if known { Report::HardwareFault(line) } else { Report::Note(line) };
        Ok(members.link.report(told)?)
    }
}

impl<B: Tape<Base = B>> Learner<B> {
    /// Whether a micro-batch's loss is finite; looked at `closely`, whether the gradients are.
    pub(in crate::train) fn judge(
        &mut self,
        step: Step,
        micro_batch: &dyn Batch,
        loss: &MicroLoss,
        closely: bool,
    ) -> Result<(), TrainError> {
        let not_finite = |what| {
            let samples = micro_batch.samples().to_vec();
            Err(TrainError::NotFinite { step, what, samples })
        };
        if !loss.loss_sum.is_finite() || !loss.valid.is_finite() {
            return not_finite("loss");
        }
        let len = self.trainables.layout().len();
        if closely && !self.grads.values_mut().squares(&[0..len]).is_finite() {
            return not_finite("gradient");
        }
        Ok(())
    }
}
