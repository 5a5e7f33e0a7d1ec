//! What this rank consumes: its samples, the threads that read them, and how a step's slice is cut.

use std::{collections::VecDeque, ops::Range, sync::Arc};

use coxswain_nn::kernels::Tape;
use coxswain_proto::{
    ids::Step,
    order::DamagedRow,
    plan::{self, Batch},
};
use coxswain_task::{Sample, Samples};

use super::{Claim, Facts, Members, TrainError};
use crate::feeder::{DataError, Prefetcher};

/// What this rank consumes.
pub(super) struct Feed {
    pub samples: Arc<dyn Samples>,
    pub prefetch: Prefetcher,
    /// Samples per forward pass now in force; an out-of-memory lowers it. Before the search for it is done,
    /// the most that it may try.
    pub micro_batch: usize,
    /// Whether `micro_batch` was searched for and found.
    pub searched: bool,
    /// Whether the process before this one was killed because memory ran out, and the ranks have not yet been
    /// told to take less.
    pub asks_for_less: bool,
    /// Steps whose samples have been requested.
    pub requested: Step,
    /// What this rank consumes in the steps from the next one to `requested`.
    pub claimed: VecDeque<Claim>,
}

impl Feed {
    /// Goes on at another step, or with other ranks: nothing is requested.
    pub fn restart(&mut self, next: Step) {
        self.requested = next;
        self.claimed.clear();
    }

    /// These positions without those whose samples need a quarantined row.
    pub fn usable(
        &self,
        seed: u64,
        quarantined: &[DamagedRow],
        epoch: u64,
        positions: Range<u64>,
    ) -> Vec<Range<u64>> {
        let batch = Batch { epoch, positions };
        let left_out = self.samples.order(seed).without(quarantined).in_batch(&batch);
        plan::without(batch.positions, &left_out)
    }

    /// So many of the samples that this rank will train on first from step `next` on, again and again where
    /// they are fewer. One that cannot be used is for another worker to try, as in a step.
    pub fn first_samples<B: Tape<Base = B>>(
        &self,
        run: &Facts<'_, B>,
        members: &Members,
        next: Step,
        size: usize,
    ) -> Result<Vec<Box<dyn Sample>>, TrainError> {
        let (seed, quarantined) = (run.spec.run.seed, &members.assignment.quarantined);
        let order = self.samples.order(seed);
        let usable = (next.0..run.plan.total_steps()).find_map(|step| {
            let batch = run.plan.batch(Step(step));
            let mine = batch.of_rank(members.rank(), members.world());
            [mine, batch.positions].into_iter().find_map(|range| {
                let positions: Vec<u64> =
                    self.usable(seed, quarantined, batch.epoch, range).into_iter().flatten().collect();
                (!positions.is_empty()).then_some((batch.epoch, positions))
            })
        });
        let Some((epoch, positions)) = usable else { return Ok(Vec::new()) };
        let chosen = positions.iter().cycle().take(size);
        let indices = chosen.filter_map(|&position| Some((position, order.sample(epoch, position)?)));
        let read = |(position, index)| {
            self.samples.read(index).map_err(|source| {
                let row = self.samples.damaged_row(index, &source);
                DataError::AtPosition { epoch, position, row, source: Box::new(source) }.into()
            })
        };
        indices.map(read).collect()
    }
}
