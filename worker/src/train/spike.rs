//! Steps whose loss is far above those of the steps before (`train.spike`).
//!
//! All ranks see the same loss, and the rank that remembers most says in its ballot what is far: one that has
//! come in the middle of the run changes nothing. A checkpoint has the losses, so a resume changes nothing
//! either.

use coxswain_nn::kernels::Tape;
use coxswain_proto::{
    ids::Step,
    report::{SkipCause, Skipped},
    run_spec::Spike,
};

use super::{
    TrainError, divergence, skip,
    training::Training,
    vote::{Fared, Verdict},
};

/// What follows for a step in which all ranks are well, and which is not left out anyway; none if it is to be
/// taken.
pub(super) fn judge<B: Tape<Base = B>>(
    training: &mut Training<'_, B>,
    step: Step,
    verdict: &Verdict,
) -> Result<Option<Skipped>, TrainError> {
    let (loss, limit) = (verdict.mean_loss(), verdict.spike_limit.1);
    if verdict.fared.0 != Fared::Ok || skip::is_asked(training.run.spec, step) {
        return Ok(None);
    }
    match training.run.spec.train.spike {
        Spike::Skip if loss > limit => Ok(Some(Skipped { cause: SkipCause::Spike, samples: Vec::new() })),
        Spike::End if loss > limit => Err(divergence::spiked(training, step, loss, limit)?),
        _ => Ok(None),
    }
}
