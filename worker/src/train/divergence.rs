//! The end of a run that has diverged, and where a resume goes on from.
//!
//! ```text
//! state not sound    weights or moments are not finite, or beyond what a product can carry: found where they
//!                    are written to a checkpoint, and where a loss or gradient is not finite
//! held-out error     it is not finite after the last step, and was before the first
//! too many skipped   step after step is left out: the state may be finite, and no loss of it is
//! ```
//!
//! Either way the state is not saved, and the newest checkpoint from which a later step was taken becomes the
//! newest: those behind it are set aside. So a resume does not begin where the run went wrong.

use coxswain_nn::kernels::Tape;
use coxswain_proto::ids::{Rank, Step};

use super::{TrainError, held_out::HeldOutError, training::Training};
use crate::{
    collective::{BufMut, Reduce},
    zero::UnsoundValue,
};

/// Looks at weights and moments after a loss or gradient that is not finite; all ranks do. What is wrong with
/// them is wrong with every later step.
pub(super) fn look<B: Tape<Base = B>>(training: &mut Training<'_, B>) -> Result<(), TrainError> {
    let found = first_unsound(training);
    let mut unsound = [f64::from(u8::from(found.is_some()))];
    training.members.comm.all_reduce(BufMut::F64(&mut unsound), Reduce::Max)?;
    if unsound[0] > 0.0 { Err(diverged(training, found)?) } else { Ok(()) }
}

/// What ends a run whose state is not sound.
pub(super) fn end<B: Tape<Base = B>>(training: &mut Training<'_, B>) -> Result<TrainError, TrainError> {
    let found = first_unsound(training);
    diverged(training, found)
}

/// What ends a run of which so many steps in a row were left out for their numbers.
pub(super) fn too_many<B: Tape<Base = B>>(
    training: &mut Training<'_, B>,
    step: Step,
) -> Result<TrainError, TrainError> {
    let (in_a_row, allowed) = (training.skips.in_a_row, training.run.spec.train.max_skipped);
    let good = retreat(training)?;
    Ok(TrainError::TooManySkipped { step, in_a_row, allowed, good })
}

/// What ends a run whose loss is far above those before, where `train.spike` is `end`.
pub(super) fn spiked<B: Tape<Base = B>>(
    training: &mut Training<'_, B>,
    step: Step,
    loss: f64,
    limit: f64,
) -> Result<TrainError, TrainError> {
    let found =
        format!("the loss of step {step} is {loss:.4}, and {limit:.4} is what train.spike_factor allows");
    let good = retreat(training)?;
    Ok(TrainError::Diverged { steps: training.next, found, good })
}

/// What ends a run whose held-out error was a number in the beginning and is none in the end.
pub(super) fn spoilt<B: Tape<Base = B>>(
    training: &mut Training<'_, B>,
    after: Option<&HeldOutError>,
) -> Result<Option<TrainError>, TrainError> {
    let first = |error: &HeldOutError| error.first().map(|(_, value)| value.is_finite());
    let before = training.before.as_ref().and_then(Option::as_ref).and_then(first);
    if before != Some(true) || after.and_then(first) != Some(false) {
        return Ok(None);
    }
    let (good, found) = (retreat(training)?, "the held-out error is not finite".into());
    Ok(Some(TrainError::Diverged { steps: training.next, found, good }))
}

fn diverged<B: Tape<Base = B>>(
    training: &mut Training<'_, B>,
    found: Option<UnsoundValue>,
) -> Result<TrainError, TrainError> {
    let found = found.map_or_else(
        || "the part of another rank is not sound (its own log says what)".to_owned(),
        |found| found.to_string(),
    );
    let good = retreat(training)?;
    Ok(TrainError::Diverged { steps: training.next, found, good })
}

fn first_unsound<B: Tape<Base = B>>(training: &mut Training<'_, B>) -> Option<UnsoundValue> {
    let weights: B::Flat = training.learner.trainables.take();
    let found = training.learner.optimizer().first_unsound(&weights);
    training.learner.trainables.put(weights);
    found
}

/// Rank 0 sets aside what is not to be gone on from; all know where a resume begins then.
fn retreat<B: Tape<Base = B>>(training: &mut Training<'_, B>) -> Result<Option<Step>, TrainError> {
    const NONE: f64 = -1.0;
    let mut good = [NONE];
    if training.members.rank() == Rank(0) {
        // What cannot be read now is as it was, and the error to tell is another one.
        match training.store.retreat(training.next, &training.skips.newest) {
            Ok(found) => good = [found.map_or(NONE, |step| step.0 as f64)],
            Err(error) => tracing::warn!(%error, "checkpoints stay as they are"),
        }
    }
    training.members.comm.broadcast(BufMut::F64(&mut good), Rank(0))?;
    Ok((good[0] >= 0.0).then_some(Step(good[0] as u64)))
}
