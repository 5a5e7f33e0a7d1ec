//! Steps whose loss is far above those of the steps before (`train.spike`).
//!
//! All ranks see the same loss, and the rank that remembers most says in its ballot what is far: one that has
//! come in the middle of the run changes nothing. A checkpoint has the losses, so a resume changes nothing
//! either.

use coxswain_nn::kernels::Tape;
use coxswain_proto::{
    report::{Skip, SkipCause},
    run_spec::Spike,
};

use crate::train::{TrainError, Verdict, Vote, Workbench};

impl Verdict {
    /// What follows for the next step, if all ranks are well and it is not left out anyway; none if it is to
    /// be taken.
    pub fn judge_spike<B: Tape<Base = B>>(
        &self,
        bench: &mut Workbench<'_, B>,
    ) -> Result<Option<Skip>, TrainError> {
        let (step, loss, limit) = (bench.next, self.mean_loss(), self.spike_limit.1);
        if self.fared.0 != Vote::Ok || bench.run.leaves_out(step) {
            return Ok(None);
        }
        match bench.run.spec.train.spike {
            Spike::Skip if loss > limit => Ok(Some(Skip { cause: SkipCause::Spike, samples: Vec::new() })),
            Spike::End if loss > limit => {
                let found = format!(
                    "the loss of step {step} is {loss:.4}, above the {limit:.4} that train.spike_factor allows"
                );
                Err(bench.diverged(Some(found))?)
            }
            _ => Ok(None),
        }
    }
}
