//! How a generation finds its state: kept by living ranks, replicated for a lost one, or read from a
//! checkpoint.
//!
//! ```text
//! table     what each rank holds and what else it carries over, gathered
//! choice    the newest version of which everything is there: pure
//! sound     a checkpoint that a rank finds damaged: all go on from the one before it
//! here      the parts are broadcast by the ranks that have them; nothing of the old state is dropped before
//!           all have the new one
//! ```
//!
//! A rank that is disturbed in the last barrier has the new state and cannot know whether all have: some may
//! have passed it and let the old state go. It keeps both, and says so in the next table.
//!
//! The first generation goes the same way: no rank holds any state, so it starts from the newest checkpoint
//! or afresh.

mod choice;
mod sound;
mod table;
#[cfg(test)]
mod tests;

use coxswain_proto::{
    ids::{Bytes, Step},
    run_spec::RunSpec,
};

pub use choice::{Choice, Holding, Source, choose};
use table::Agreed;
pub(super) use table::Carried;

use super::{
    TrainError,
    facts::Facts,
    features::Features,
    init_from,
    learner::{Held, Learner},
    members::Members,
    training::Training,
};
use crate::{
    clock,
    collective::{BufMut, CollectiveError},
    link::{Start, StateSource},
    zero::ShardState,
};
use coxswain_nn::kernels::Tape;

impl<B: Tape<Base = B>> Training<'_, B> {
    /// Agrees with the other ranks of a new generation where to start, and takes over that state. `self.next`
    /// is where.
    pub(super) fn settle(&mut self) -> Result<Start, TrainError> {
        let began = clock::now();
        let holdings =
            [&self.learner.held, &self.learner.coming].map(|held| held.as_ref().and_then(Held::holding));
        let own = table::Own { holdings, carried: &self.carried(), asks_for_less: self.feed.asks_for_less };
        let Agreed { holdings, carried, asks_for_less } =
            table::exchange(own, self.learner.objective.measures(), self.members.comm.as_mut())?;
        let (source, bytes) = match choose(&holdings, self.members.assignment.checkpoint_step) {
            Some(choice) => {
                let bytes = self.learner.take_over(&choice, self.run.spec, &mut self.members)?;
                self.next = Step(choice.version);
                let replicated = choice.uses_replica();
                (if replicated { StateSource::Replica } else { StateSource::Carried }, bytes)
            }
            None if self.members.assignment.checkpoint_step > Step(0) => {
                (StateSource::Checkpoint, sound::restore(self, self.members.assignment.checkpoint_step)?)
            }
            None => {
                self.run.starts = self.learner.begin_afresh(&self.run, &self.members)?;
                self.next = Step(0);
                (StateSource::Fresh, Bytes(0))
            }
        };
        let restored = source == StateSource::Checkpoint;
        self.carry_on(carried, restored)?;
        if let Some(rank) = asks_for_less {
            self.shrink_after_kill(rank)?;
        }
        Ok(Start { first_step: self.next, source, bytes, took: began.elapsed() })
    }

    /// What this rank did that later decisions depend on.
    fn carried(&self) -> Carried {
        Carried {
            checkpoints: self.obeyed.checkpoints,
            memory_reports: self.obeyed.memory_reports,
            micro_batch: self.feed.micro_batch as u32,
            searched: self.feed.searched,
            saved: self.saved,
            before: self.before.clone(),
            stopped: self.stopped,
            skipped_in_a_row: self.skips.in_a_row,
            cache: self.features.as_ref().and_then(Features::mark),
        }
    }

    fn carry_on(&mut self, carried: Carried, restored: bool) -> Result<(), TrainError> {
        self.obeyed.checkpoints = carried.checkpoints;
        self.obeyed.memory_reports = carried.memory_reports;
        self.before = carried.before;
        self.stopped = carried.stopped;
        // A checkpoint says for itself which step it is of, and which micro-batch fitted. Steps behind it
        // that were left out come again, and count then.
        self.skips.in_a_row = 0;
        self.skips.newest.split_off(&self.next);
        self.skips.losses.go_back(self.next);
        if !restored {
            self.skips.in_a_row = carried.skipped_in_a_row;
            self.feed.micro_batch = carried.micro_batch as usize;
            self.feed.searched = carried.searched;
            self.saved = carried.saved;
            self.with_features(|features, desk| features.resume(desk, carried.cache))?;
        }
        Ok(())
    }
}

impl<B: Tape<Base = B>> Learner<B> {
    /// Every rank starts with what the specification says; in words, where that is not chance.
    fn begin_afresh(&mut self, run: &Facts<'_, B>, members: &Members) -> Result<Vec<String>, TrainError> {
        let layout = self.trainables.layout();
        let mut values = match self.held {
            None => self.trainables.to_vec(),
            Some(_) => self.objective.initial_values(layout)?,
        };
        values.truncate(layout.len());
        let starts = init_from::take(run.task, run.spec, layout, &mut values)?;
        let mut optimizer = self.empty_optimizer(run.spec, members);
        optimizer.begin_average(&values);
        optimizer.begin(0, 0, &values);
        self.trainables.set(values);
        self.hold(optimizer, members);
        Ok(starts)
    }

    /// Every part is broadcast by its source; returns the bytes that came in.
    fn take_over(
        &mut self,
        choice: &Choice,
        spec: &RunSpec,
        members: &mut Members,
    ) -> Result<Bytes, TrainError> {
        self.coming.take_if(|coming| coming.generation == choice.generation).into_iter().for_each(|coming| {
            // All ranks go on from what this one has been taking over, so what it had before is not needed
            // any more.
            self.held = Some(coming);
        });
        let mut weights = self.trainables.to_vec();
        let mut optimizer = self.empty_optimizer(spec, members);
        let averaged = optimizer.average().is_some();
        let (own_rank, mut received) = (members.comm.rank(), 0);
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
                    let mut state = ShardState::zeros(range.len(), averaged);
                    received += state.buffers().map(|buffer| 4 * buffer.len() as u64).iter().sum::<u64>();
                    state
                }
            };
            // Without an average its place is empty on all ranks.
            for buffer in state.buffers().into_iter().filter(|buffer| !buffer.is_empty()) {
                members.comm.broadcast(BufMut::F32(buffer), source.from)?;
            }
            weights[range.clone()].copy_from_slice(&state.weights);
            optimizer.adopt(&range, &state);
        }
        optimizer.begin(choice.version, choice.skipped, &weights);
        optimizer.restore_loss_scale(choice.loss_scale);
        // A rank that passes this knows that all have everything, so the old state may go.
        if let Err(error) = members.comm.barrier() {
            let (generation, weights) = (members.assignment.generation, Some(weights));
            self.coming = Some(Held { generation, optimizer, weights, trusted: true });
            return Err(error.into());
        }
        self.trainables.set(weights);
        self.hold(optimizer, members);
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
                | CollectiveError::Transport { .. }
        )
    };
    match error {
        TrainError::Collective(error) | TrainError::Optimizer(StepError::Collective(error)) => of_ring(error),
        // The coordinator knows whether that rank can go on, and without what.
        TrainError::Link(LinkError::Aborted(_)) | TrainError::PeerFailed(_) => true,
        // What is wrong is forgotten, and comes from the others or from a checkpoint.
        TrainError::Differ { .. } => true,
        _ => false,
    }
}
