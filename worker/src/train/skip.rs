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
    report::{SkipCause, Skipped},
    run_spec::RunSpec,
};
use coxswain_task::{Batch, MicroLoss, StageClock};

use super::{TrainError, divergence, learner::Learner, tally::Doubted, training::Training};
use crate::{
    feeder::Prepared,
    link::{Phase, Report, StepReport},
    memory,
};

/// Whether the run file names this step to be left out.
pub(super) fn is_asked(spec: &RunSpec, step: Step) -> bool {
    spec.train.skip_steps.contains(&step.0)
}

/// What is said of such a step.
pub(super) fn asked() -> Skipped {
    Skipped { cause: SkipCause::Asked, samples: Vec::new() }
}

/// An attempt whose numbers are not finite.
pub(super) struct Doubt {
    pub cause: SkipCause,
    /// The rank that speaks of it.
    pub rank: Rank,
    /// What this rank has found itself; none where others have.
    pub error: Option<TrainError>,
}

/// What follows: the same once more, or, the second time, why the step is left out.
pub(super) fn doubt<B: Tape<Base = B>>(
    training: &mut Training<'_, B>,
    step: Step,
    doubt: &Doubt,
    last: Option<Prepared>,
    tried: &mut Option<Doubted>,
) -> Result<Option<Skipped>, TrainError> {
    if let Some(Doubted { cause, .. }) = *tried {
        let samples = blame(training, step, doubt, last.as_ref())?;
        return Ok(Some(Skipped { cause, samples }));
    }
    divergence::look(training)?;
    *tried = Some(Doubted { cause: doubt.cause, rank: doubt.rank });
    if let Some(error) = doubt.error.as_ref().filter(|_| training.members.rank() == doubt.rank) {
        let line = format!("{error}: step {step} runs once more in its place");
        training.members.link.report(Report::Note(line))?;
    }
    training.recut(step, last)?;
    Ok(None)
}

/// Samples of the micro-batch that ran last, if it is to blame: those that are not finite by themselves,
/// or all where none is. None where the norm alone is not finite, or another rank has the micro-batch.
fn blame<B: Tape<Base = B>>(
    training: &mut Training<'_, B>,
    step: Step,
    doubt: &Doubt,
    last: Option<&Prepared>,
) -> Result<Vec<u64>, TrainError> {
    let local = matches!(doubt.error, Some(TrainError::NotFinite { .. } | TrainError::Task(_)));
    let Some(last) = last.filter(|_| local) else { return Ok(Vec::new()) };
    let all = last.batch.samples().iter().copied().take(MAX_SKIPPED_SAMPLES).collect::<Vec<_>>();
    if all.len() == 1 {
        return Ok(all);
    }
    let mut guilty = Vec::new();
    for &sample in &all {
        // A sign of motion for each, in a phase where it is known what a pass may take.
        training.enter(Phase::Forward, step)?;
        if is_guilty(training, step, sample) {
            guilty.push(sample);
        }
    }
    training.enter(Phase::Data, step)?;
    Ok(if guilty.is_empty() { all } else { guilty })
}

/// Whether a sample's loss or gradient is not finite where it is alone. One that cannot be run says
/// nothing.
fn is_guilty<B: Tape<Base = B>>(training: &mut Training<'_, B>, step: Step, sample: u64) -> bool {
    let epoch = training.run.plan.batch(step).epoch;
    let Ok(sample) = training.feed.samples.read_in_epoch(sample, epoch) else { return false };
    let batch = training.feed.samples.batch(step, &[sample]);
    let Learner { objective, trainables, grads, .. } = &mut training.learner;
    grads.zero();
    let mut clock = StageClock::default();
    let run = || objective.forward_backward(trainables, &*batch, grads, &mut clock);
    let outcome = memory::guarded(run);
    if !matches!(outcome, Ok(Ok(_))) {
        free_broken_off::<B>(&training.learner.trainables.device());
    }
    match outcome {
        Ok(Ok(loss)) => training.learner.judge(step, &*batch, &loss, true).is_err(),
        Ok(Err(error)) => TrainError::Task(error).is_not_finite(),
        Err(_) => false,
    }
}

/// All ranks leave the step out, after what ends with it whether or not it counts.
pub(super) fn leave_out<B: Tape<Base = B>>(
    training: &mut Training<'_, B>,
    step: Step,
    cause: SkipCause,
) -> Result<(), TrainError> {
    training.with_features(|features, desk| features.settle_epoch(desk, step))?;
    let held = training.learner.held.as_mut().expect("a generation begins with a state");
    held.optimizer.skip(cause == SkipCause::Overflow);
    Ok(())
}

/// Counts a step that is done, and keeps for checkpoints that it was left out; whether more in a row were
/// left out for their numbers than may be.
pub(super) fn count<B: Tape<Base = B>>(training: &mut Training<'_, B>, done: &StepReport) -> bool {
    training.skips.book(done.step, done.skipped.as_ref());
    if done.skipped.is_none() {
        training.skips.losses.book(done.step, done.totals.mean_loss());
    }
    training.skips.in_a_row > training.run.spec.train.max_skipped
}

/// The second attempt was well.
pub(super) fn tell_cleared<B: Tape<Base = B>>(
    training: &mut Training<'_, B>,
    step: Step,
    doubted: Doubted,
) -> Result<(), TrainError> {
    let known = doubted.cause == SkipCause::Loss;
    if training.members.rank() != if known { doubted.rank } else { Rank(0) } {
        return Ok(());
    }
    let what = if known { "loss" } else { "gradient" };
    let line = format!(
        "step {step}: the {what} is finite the second time, from the same samples and draws: if this comes back, look at \
         the memory and the GPU of {}",
        if known { "this rank" } else { "the rank that reported it first" }
    );
    let told = if known { Report::HardwareFault(line) } else { Report::Note(line) };
    Ok(training.members.link.report(told)?)
}

impl<B: Tape<Base = B>> Learner<B> {
    /// Whether a micro-batch's loss is finite; looked at `closely`, whether the gradients are.
    pub(super) fn judge(
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
