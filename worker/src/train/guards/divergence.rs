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

use crate::collective::{BufMut, Reduce};
use crate::train::{TrainError, Workbench};

impl<B: Tape<Base = B>> Workbench<'_, B> {
    /// Looks at weights and moments after a loss or gradient that is not finite; all ranks do. What is wrong
    /// with them is wrong with every later step.
    pub(in crate::train) fn require_sound(&mut self) -> Result<(), TrainError> {
        let found = self.unsound();
        let mut unsound = [f64::from(u8::from(found.is_some()))];
        self.members.comm.all_reduce(BufMut::F64(&mut unsound), Reduce::Max)?;
        if unsound[0] > 0.0 { Err(self.diverged(found)?) } else { Ok(()) }
    }

    /// The first of this rank's weights and moments that is not finite, or beyond what a product can carry.
    pub(in crate::train) fn unsound(&mut self) -> Option<String> {
        let weights: B::Flat = self.learner.trainables.take();
        let found = self.learner.optimizer().first_unsound(&weights);
        self.learner.trainables.put(weights);
        found.map(|found| found.to_string())
    }

    /// Refuses to go on behind this step where too many in a row were left out for their numbers.
    pub(in crate::train) fn require_few_skips(&mut self, step: Step) -> Result<(), TrainError> {
        let (in_a_row, allowed) = (self.skips.in_a_row, self.run.spec.train.max_skipped);
        if in_a_row <= allowed {
            return Ok(());
        }
        Err(TrainError::TooManySkipped { step, in_a_row, allowed, good: self.retreat()? })
    }

    /// What ends a run that has diverged; `found` is what this rank knows of it.
    pub(in crate::train) fn diverged(&mut self, found: Option<String>) -> Result<TrainError, TrainError> {
        let others = || {
            "the weights or moments of another rank are not finite or too large (its own log names them)"
                .to_owned()
        };
        let (steps, found) = (self.next, found.unwrap_or_else(others));
        Ok(TrainError::Diverged { steps, found, good: self.retreat()? })
    }

    /// Rank 0 sets aside what is not to be gone on from; all know where a resume begins then.
    fn retreat(&mut self) -> Result<Option<Step>, TrainError> {
        const NONE: f64 = -1.0;
        let mut good = [NONE];
        if self.members.rank() == Rank(0) {
            // What cannot be read now is as it was, and the error to tell is another one.
            match self.run.store.retreat(self.next, &self.skips.newest) {
                Ok(found) => good = [found.map_or(NONE, |step| step.0 as f64)],
                Err(error) => tracing::warn!(%error, "cannot set diverged checkpoints aside"),
            }
        }
        self.members.comm.broadcast(BufMut::F64(&mut good), Rank(0))?;
        Ok((good[0] >= 0.0).then_some(Step(good[0] as u64)))
    }
}
