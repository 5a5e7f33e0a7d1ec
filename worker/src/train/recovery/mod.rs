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
//!
//! Which one is the newest, the disk says: a rank that is killed between publishing a checkpoint and telling
//! the coordinator leaves one that nobody has heard of, and for its sake an older one is pruned.

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
pub(super) use table::Handover;
use table::RecoveryAgreement;

use super::{Facts, Features, GenerationState, Learner, Members, TrainError, Training, Workbench, init_from};
use crate::{
    clock,
    collective::CollectiveError,
    link::{Start, StateSource},
};
use coxswain_nn::kernels::Tape;

impl<B: Tape<Base = B>> Training<'_, B> {
    /// Agrees with the other ranks of a new generation where to start, and takes over that state. The
    /// workbench's `next` is where.
    pub(super) fn settle(&mut self) -> Result<Start, TrainError> {
        let began = clock::now();
        let carried = &self.carried();
        let bench = &mut self.bench;
        let holdings = [&bench.learner.held, &bench.learner.coming]
            .map(|held| held.as_ref().and_then(GenerationState::holding));
        let found = self.results.tell_unknown(bench)?;
        let own = table::RankRecord { holdings, carried, asks_for_less: bench.feed.asks_for_less, found };
        let RecoveryAgreement { holdings, carried, asks_for_less, found } =
            table::exchange(own, bench.learner.objective.measures(), bench.members.comm.as_mut())?;
        let newest = bench.members.assignment.checkpoint_step.max(found.unwrap_or_default());
        let (source, bytes) = match choose(&holdings, newest) {
            Some(choice) => {
                let bytes = bench.learner.take_over(&choice, bench.run.spec, &mut bench.members)?;
                bench.next = Step(choice.version);
                let replicated = choice.uses_replica();
                (if replicated { StateSource::Replica } else { StateSource::Carried }, bytes)
            }
            None if newest > Step(0) => {
                (StateSource::Checkpoint, sound::restore(&mut self.results, bench, newest)?)
            }
            None => {
                bench.run.starts = bench.learner.begin_afresh(&bench.run, &bench.members)?;
                bench.next = Step(0);
                (StateSource::Fresh, Bytes(0))
            }
        };
        self.carry_on(carried, source == StateSource::Checkpoint)?;
        let Workbench { run, members, feed, next, .. } = &mut self.bench;
        if let Some(rank) = asks_for_less {
            feed.shrink_after_kill(run, members, *next, rank)?;
        }
        Ok(Start { first_step: *next, source, bytes, took: began.elapsed() })
    }

    /// What this rank did that later decisions depend on.
    fn carried(&self) -> Handover {
        let Workbench { feed, skips, features, .. } = &self.bench;
        Handover {
            checkpoints: self.obeyed.checkpoints,
            memory_reports: self.obeyed.memory_reports,
            micro_batch: feed.micro_batch as u32,
            searched: feed.searched,
            saved: self.results.saved,
            before: self.looking.before.clone(),
            stopped: self.obeyed.stop,
            skipped_in_a_row: skips.in_a_row,
            cache: features.as_ref().and_then(Features::mark),
        }
    }

    fn carry_on(&mut self, carried: Handover, restored: bool) -> Result<(), TrainError> {
        self.obeyed.checkpoints = carried.checkpoints;
        self.obeyed.memory_reports = carried.memory_reports;
        self.looking.before = carried.before;
        self.obeyed.stop = carried.stopped;
        let bench = &mut self.bench;
        // A checkpoint says for itself which step it is of, and which micro-batch fitted. Steps behind it
        // that were left out come again, and count then.
        bench.skips.in_a_row = 0;
        bench.skips.newest.split_off(&bench.next);
        bench.skips.losses.go_back(bench.next);
        if !restored {
            bench.skips.in_a_row = carried.skipped_in_a_row;
            bench.feed.micro_batch = carried.micro_batch as usize;
            bench.feed.searched = carried.searched;
            self.results.saved = carried.saved;
            bench.with_features(|features, desk| features.resume(desk, carried.cache))?;
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
                    let state = optimizer.empty_state(&range);
                    received += state.bytes();
                    state
                }
            };
            state.broadcast(source.from, members.comm.as_mut())?;
            weights[range.clone()].copy_from_slice(&state.weights);
            optimizer.adopt(&range, &state);
        }
        optimizer.begin(choice.version, choice.skipped, &weights);
        optimizer.restore_loss_scale(choice.loss_scale);
        // A rank that passes this knows that all have everything, so the old state may go.
        if let Err(error) = members.comm.barrier() {
            let (generation, weights) = (members.assignment.generation, Some(weights));
            self.coming = Some(GenerationState { generation, optimizer, weights, trusted: true });
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
