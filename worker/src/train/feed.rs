//! What this rank consumes: its samples, the threads that read them, and how a step's slice is cut.

use std::{collections::VecDeque, ops::Range, sync::Arc};

use coxswain_proto::{
    ids::Step,
    order::DamagedRow,
    plan::{self, Batch},
};
use coxswain_task::Samples;

use super::features::Claim;
use crate::feeder::Prefetcher;

/// What this rank consumes.
pub(super) struct Feed {
    pub samples: Arc<dyn Samples>,
    pub prefetch: Prefetcher,
    /// Samples per forward pass now in force; an out-of-memory lowers it. Before the search for it is done, the most that it may try.
    pub micro_batch: usize,
    /// Whether `micro_batch` was searched for and found.
    pub searched: bool,
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
        let left_out = self.samples.order(seed).without(quarantined).of(&batch);
        plan::without(batch.positions, &left_out)
    }
}
