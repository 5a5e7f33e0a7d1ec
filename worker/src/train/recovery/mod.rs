//! How a generation finds its state: kept by living ranks, mirrored for a lost one, or read from a checkpoint.
//!
//! ```text
//! table     what each rank holds and what else it carries over, gathered
//! choice    the newest version of which everything is there: pure
//! here      the parts are broadcast by those who have them; nothing of the old state is let go before all have the new one
//! ```
//!
//! Whoever is disturbed in the last barrier has the new state and cannot know whether all have: some may have passed it and let the old state
//! go. It keeps both, and says so in the next table.
//!
//! The first generation goes the same way: nobody holds anything, so it starts from the newest checkpoint or afresh.

mod choice;
mod table;
#[cfg(test)]
mod tests;

use std::time::Instant;

use coxswain_proto::{
    ids::{Bytes, Generation, Step},
    run_spec::Offload,
};

pub use choice::{Choice, Holding, Source, choose};
pub(super) use table::Carried;

use super::{TrainError, run::Training};
use coxswain_nn::kernels::{
        Tape,
        flat::{Flat, FlatOn},
    };
use crate::{collective::{BufMut, CollectiveError}, link::{Start, StateSource}, zero::{Keeps, MirroredAdamW, ShardState}};

/// The optimizer, and the generation whose partition it follows.
pub(super) struct Held<F: Flat> {
    pub generation: Generation,
    pub optimizer: MirroredAdamW<F>,
    /// Weights of that state; none if they are the ones that train.
    pub weights: Option<Vec<f32>>,
}

impl<F: Flat> Held<F> {
    fn holding(&self) -> Holding {
        let (own, mirror) = self.optimizer.versions();
        let world = self.optimizer.world() as u32;
        Holding { generation: self.generation, world, rank: self.optimizer.rank(), own, mirror }
    }
}

impl<B: Tape<Base = B>> Training<'_, B> {
    /// Agrees with the other ranks of a new generation where to start, and takes over that state. `self.next` is where.
    pub(super) fn settle(&mut self) -> Result<Start, TrainError> {
        let began = Instant::now();
        let holdings = [&self.held, &self.coming].map(|held| held.as_ref().map(Held::holding));
        let (holdings, carried) = table::exchange(holdings, &self.carried(), self.objective.measures(), self.comm.as_mut())?;
        let (source, bytes) = match choose(&holdings, self.assignment.checkpoint_step) {
            Some(choice) => {
                let bytes = self.take_over(&choice)?;
                let mirrored = choice.uses_mirror();
                (if mirrored { StateSource::Mirror } else { StateSource::Carried }, bytes)
            }
            None if self.assignment.checkpoint_step > Step(0) => {
                (StateSource::Checkpoint, self.restore(self.assignment.checkpoint_step)?)
            }
            None => {
                self.begin_afresh()?;
                (StateSource::Fresh, Bytes(0))
            }
        };
        let restored = source == StateSource::Checkpoint;
        self.carry_on(carried, restored)?;
        Ok(Start { first_step: self.next, source, bytes, took: began.elapsed() })
    }

    /// What this rank did that later decisions depend on.
    fn carried(&self) -> Carried {
        Carried {
            checkpoints: self.obeyed.checkpoints,
            memory_reports: self.obeyed.memory_reports,
            micro_batch: self.micro_batch as u32,
            searched: self.searched,
            saved: self.saved,
            before: self.before.clone(),
            stopped: self.stopped,
            cache: self.cache_mark(),
        }
    }

    fn carry_on(&mut self, carried: Carried, restored: bool) -> Result<(), TrainError> {
        self.obeyed.checkpoints = carried.checkpoints;
        self.obeyed.memory_reports = carried.memory_reports;
        self.before = carried.before;
        self.stopped = carried.stopped;
        // A checkpoint says for itself which step it is of, and which micro-batch fitted.
        if !restored {
            self.micro_batch = carried.micro_batch as usize;
            self.searched = carried.searched;
            self.saved = carried.saved;
            self.resume_cache(carried.cache)?;
        }
        Ok(())
    }

    /// An optimizer for this generation's partition, without a state.
    pub(super) fn empty_optimizer(&self) -> MirroredAdamW<B::Flat> {
        let offloaded = self.spec.memory.offload == Offload::Optimizer;
        MirroredAdamW::at(
            &B::Flat::place(&self.trainables.device()),
            self.trainables.layout(),
            (self.comm.world(), self.assignment.rank),
            &self.spec.optimizer,
            Keeps { mirror: self.spec.faults.mirror, offloaded },
        )
    }

    /// From now on this is the state, at step `next`.
    pub(super) fn hold(&mut self, optimizer: MirroredAdamW<B::Flat>, next: Step) {
        self.held = Some(Held { generation: self.assignment.generation, optimizer, weights: None });
        self.coming = None;
        self.next = next;
    }

    /// Every rank starts with what the specification says.
    fn begin_afresh(&mut self) -> Result<(), TrainError> {
        let values = match self.held {
            None => self.trainables.to_vec(),
            Some(_) => self.objective.initial_values(self.trainables.layout())?,
        };
        let mut optimizer = self.empty_optimizer();
        optimizer.begin(0, &values);
        self.trainables.set(values);
        self.hold(optimizer, Step(0));
        Ok(())
    }

    /// Every part is broadcast by its source; returns the bytes that came in.
    fn take_over(&mut self, choice: &Choice) -> Result<Bytes, TrainError> {
        self.coming.take_if(|coming| coming.generation == choice.generation).into_iter().for_each(|coming| {
            // All ranks go on from what this one has been taking over, so what it had before is nobody's any more.
            self.held = Some(coming);
        });
        let mut weights = self.trainables.to_vec();
        let mut optimizer = self.empty_optimizer();
        let (own_rank, mut received) = (self.comm.rank(), 0);
        for (part, source) in choice.sources.iter().enumerate() {
            let range = optimizer.part_in(choice.sources.len(), part);
            let mine = self.held.as_ref().filter(|_| source.from == own_rank);
            let mut state = match mine {
                Some(held) => held
                    .optimizer
                    .state(
                        source.copy,
                        choice.version,
                        held.weights.as_deref().unwrap_or(&weights),
                        self.grads.values(),
                    )
                    .expect("a rank is chosen for what it said it holds"),
                None => {
                    received += 12 * range.len() as u64;
                    ShardState::zeros(range.len())
                }
            };
            let ShardState { weights: values, exp_avg, exp_avg_sq } = &mut state;
            for buffer in [values, exp_avg, exp_avg_sq] {
                self.comm.broadcast(BufMut::F32(buffer), source.from)?;
            }
            weights[range.clone()].copy_from_slice(&state.weights);
            optimizer.adopt(&range, &state);
        }
        optimizer.begin(choice.version, &weights);
        // Whoever passes this knows that all have everything, so the old state may go.
        if let Err(error) = self.comm.barrier() {
            let (generation, weights) = (self.assignment.generation, Some(weights));
            self.coming = Some(Held { generation, optimizer, weights });
            return Err(error.into());
        }
        self.trainables.set(weights);
        self.hold(optimizer, Step(choice.version));
        Ok(Bytes(received))
    }
}

/// Whether an error means that this rank is well and its generation is not.
pub(super) fn is_the_generations(error: &TrainError) -> bool {
    use crate::{link::LinkError, zero::StepError};
    let of_ring = |error: &CollectiveError| {
        matches!(
            error,
            CollectiveError::PeerLost { .. }
                | CollectiveError::Aborted { .. }
                | CollectiveError::Connect(_)
                | CollectiveError::Fabric { .. }
        )
    };
    match error {
        TrainError::Collective(error) | TrainError::Optimizer(StepError::Collective(error)) => of_ring(error),
        // The coordinator knows whether that rank can go on, and without what.
        TrainError::Link(LinkError::Aborted(_)) | TrainError::PeerFailed(_) => true,
        _ => false,
    }
}
