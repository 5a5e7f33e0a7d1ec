//! What follows a vote in which all ranks were well: the learner takes the step.

use coxswain_nn::kernels::Tape;
use coxswain_proto::ids::Step;

use super::{TrainError, learner::Learner, members::Members};
use crate::{
    clock,
    link::StepTimes,
    memory,
    zero::{GroupNorm, StepInput},
};

/// Norms of the global gradient, before clipping.
#[derive(Debug)]
pub(super) struct Norms {
    pub all: f64,
    pub groups: Vec<GroupNorm>,
}

impl<B: Tape<Base = B>> Learner<B> {
    /// Reduce, clip, AdamW on this rank's shard, gather.
    pub(super) fn update(
        &mut self,
        step: Step,
        input: &StepInput,
        members: &mut Members,
        times: &mut StepTimes,
    ) -> Result<Norms, TrainError> {
        let (updating, busy) = (clock::now(), members.communicating());
        let mut weights: B::Flat = self.trainables.take();
        let held = self.held.as_mut().expect("a generation begins with a state");
        let grads = self.grads.values_but(input.resting, self.trainables.layout());
        let outcome = held.optimizer.step(grads, &mut weights, input, members.comm.as_mut());
        self.trainables.put(weights);
        let communication = members.communicating() - busy;
        times.communication += communication;
        times.optimizer += updating.elapsed().saturating_sub(communication);
        // Refused here, memory is missing in the middle of a step that others may have taken: what this rank
        // holds is not to be trusted, and its part is its neighbour's replica's to give.
        match memory::refused() {
            Some(detail) => Err(TrainError::Device { step, detail }),
            None => {
                let outcome = outcome?;
                Ok(Norms { all: outcome.grad_norm, groups: outcome.group_norms })
            }
        }
    }
}
