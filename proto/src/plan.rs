//! Which positions of the sample order belong to which step and rank: pure integer arithmetic, shared by
//! coordinator and workers.
//!
//! ```text
//! epoch     0                          1                      N samples each, G of them a step
//! step      0    1    2    3           4    5    6    7
//! positions |0..G|..2G|..3G|3G..N|     |0..G|..2G|..3G|3G..N|   the last step of an epoch is smaller, never
//!                                                               dropped or merged
//! rank      r of W takes [n*r/W, n*(r+1)/W) of a step's n samples; slices differ by at most one sample
//! micro     a slice is cut in chunks of `micro_batch`, the last one smaller
//! ```
//!
//! A *position* is a place in an epoch's order, `0..N`; which sample stands there is the data module's
//! affair. Nothing here depends on world size but the slice, so another world size trains on the same samples
//! in the same steps.

use std::ops::Range;

use crate::{
    ids::{Rank, Step},
    run_spec::Train,
};

/// Why a run cannot be planned.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// The data set leaves nothing to train on.
    #[error("data.path: no training samples are left after data.holdout_episodes; hold out fewer episodes")]
    NoSamples,
    /// A batch of nothing.
    #[error("train.global_batch: must be at least 1")]
    EmptyBatch,
    /// Neither or both of the two ways to say how long.
    #[error("train: give either `steps` or `epochs`")]
    Length,
    /// The product does not fit.
    #[error("train.epochs: {epochs} epochs of {steps} steps are more steps than can be counted; use fewer")]
    TooLong {
        /// As asked.
        epochs: u64,
        /// Steps of one epoch.
        steps: u64,
    },
}

/// The whole run as numbers of samples and steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    samples: u64,
    global_batch: u64,
    total_steps: u64,
}

/// The samples of one step, over all ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    /// Which pass over the training samples.
    pub epoch: u64,
    /// Positions of that epoch's order.
    pub positions: Range<u64>,
}

impl Plan {
    /// The plan of a run over `training_samples` samples.
    pub fn new(train: &Train, training_samples: u64) -> Result<Self, PlanError> {
        let global_batch = train.global_batch as u64;
        if training_samples == 0 {
            return Err(PlanError::NoSamples);
        }
        if global_batch == 0 {
            return Err(PlanError::EmptyBatch);
        }
        let steps = training_samples.div_ceil(global_batch);
        let total_steps = match (train.steps, train.epochs) {
            (Some(steps), None) => steps,
            (None, Some(epochs)) => epochs.checked_mul(steps).ok_or(PlanError::TooLong { epochs, steps })?,
            _ => return Err(PlanError::Length),
        };
        Ok(Self { samples: training_samples, global_batch, total_steps })
    }

    /// Samples in an epoch, `N`.
    pub fn samples(&self) -> u64 {
        self.samples
    }

    /// Samples in a step that is not the last of its epoch, `G`.
    pub fn global_batch(&self) -> u64 {
        self.global_batch
    }

    /// Steps from the first to the last.
    pub fn total_steps(&self) -> u64 {
        self.total_steps
    }

    /// Steps of an epoch, `ceil(N / G)`.
    pub fn steps_per_epoch(&self) -> u64 {
        self.samples.div_ceil(self.global_batch)
    }

    /// The epoch a step belongs to.
    pub fn epoch(&self, step: Step) -> u64 {
        step.0 / self.steps_per_epoch()
    }

    /// The samples of a step.
    pub fn batch(&self, step: Step) -> Batch {
        let within = step.0 % self.steps_per_epoch();
        let begin = within * self.global_batch;
        let end = begin.saturating_add(self.global_batch).min(self.samples);
        Batch { epoch: self.epoch(step), positions: begin..end }
    }
}

impl Batch {
    /// Samples.
    pub fn len(&self) -> u64 {
        self.positions.end - self.positions.start
    }

    /// True without samples; never so for a batch of a [`Plan`].
    pub fn is_empty(&self) -> bool {
        self.positions.is_empty()
    }

    /// The epoch's positions that `rank` of `world` consumes.
    pub fn of_rank(&self, rank: Rank, world: u32) -> Range<u64> {
        let slice = slice(self.len(), rank, world);
        self.positions.start + slice.start..self.positions.start + slice.end
    }
}

/// The part of a batch of `len` samples that belongs to `rank` of `world`: positions within the batch.
///
/// Slices of all ranks are disjoint, in rank order and cover the batch; with fewer samples than ranks some
/// are empty. `rank` must be below `world`.
pub fn slice(len: u64, rank: Rank, world: u32) -> Range<u64> {
    debug_assert!(rank.0 < world, "rank {rank} in a world of {world}");
    let cut = |r: u32| (u128::from(len) * u128::from(r) / u128::from(world)) as u64;
    cut(rank.0)..cut(rank.0 + 1)
}

/// What is left of `positions` without those in `skipped`, in order; ranges of `skipped` may overlap and come
/// in any order.
pub fn without(positions: Range<u64>, skipped: &[Range<u64>]) -> Vec<Range<u64>> {
    let mut holes: Vec<_> = skipped.iter().filter(|hole| !hole.is_empty()).cloned().collect();
    holes.sort_by_key(|hole| hole.start);
    let (mut left, mut next) = (Vec::new(), positions.start);
    for hole in holes {
        let end = hole.start.min(positions.end);
        if next < end {
            left.push(next..end);
        }
        next = next.max(hole.end);
    }
    if next < positions.end {
        left.push(next..positions.end);
    }
    left
}

/// Ranges as they are, but those that follow on each other as one, and empty ones as none.
pub fn joined(ranges: impl IntoIterator<Item = Range<u64>>) -> Vec<Range<u64>> {
    let mut joined: Vec<Range<u64>> = Vec::new();
    for range in ranges.into_iter().filter(|range| !range.is_empty()) {
        match joined.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => joined.push(range),
        }
    }
    joined
}

/// Cuts a slice into micro-batches of at most `micro_batch` samples (at least one), in order.
pub fn micro_batches(slice: Range<u64>, micro_batch: u64) -> impl ExactSizeIterator<Item = Range<u64>> {
    let size = micro_batch.max(1);
    let count = slice.end.saturating_sub(slice.start).div_ceil(size);
    let count = usize::try_from(count).expect("a slice of a batch is counted in usize by RunSpec");
    (0..count).map(move |i| {
        let begin = slice.start + i as u64 * size;
        begin..begin.saturating_add(size).min(slice.end)
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::run_spec::Recompute;

    fn train(global_batch: usize, steps: Option<u64>, epochs: Option<u64>) -> Train {
        Train {
            steps,
            epochs,
            global_batch,
            micro_batch: 1,
            auto_micro_batch: false,
            recompute: Recompute::None,
            checkpoint_every: 0,
            keep_checkpoints: 1,
            log_every: 1,
            max_skipped: 10,
            max_left_out: 0.05,
            spike: Default::default(),
            spike_factor: 20.0,
            skip_steps: Vec::new(),
            resume: true,
            init_from: None,
            init_digest: None,
            base_digest: None,
        }
    }

    #[test]
    fn the_last_step_of_an_epoch_is_smaller_and_the_next_epoch_starts_anew() {
        let plan = Plan::new(&train(4, None, Some(2)), 10).unwrap();
        assert_eq!((plan.steps_per_epoch(), plan.total_steps()), (3, 6));
        assert_eq!(plan.batch(Step(2)), Batch { epoch: 0, positions: 8..10 });
        assert_eq!(plan.batch(Step(3)), Batch { epoch: 1, positions: 0..4 });
    }

    #[test]
    fn steps_may_end_in_the_middle_of_an_epoch() {
        let plan = Plan::new(&train(4, Some(5), None), 10).unwrap();
        assert_eq!(plan.total_steps(), 5);
        assert_eq!(plan.epoch(Step(4)), 1);
    }

    #[test]
    fn a_run_without_samples_batch_or_length_is_refused() {
        assert_eq!(Plan::new(&train(4, Some(1), None), 0), Err(PlanError::NoSamples));
        assert_eq!(Plan::new(&train(0, Some(1), None), 1), Err(PlanError::EmptyBatch));
        assert_eq!(Plan::new(&train(4, None, None), 1), Err(PlanError::Length));
        assert_eq!(Plan::new(&train(4, Some(1), Some(1)), 1), Err(PlanError::Length));
        let endless = Plan::new(&train(1, None, Some(u64::MAX)), 2);
        assert_eq!(endless, Err(PlanError::TooLong { epochs: u64::MAX, steps: 2 }));
    }

    #[test]
    fn with_more_ranks_than_samples_some_ranks_have_none() {
        let sizes: Vec<_> = (0..5).map(|r| slice(3, Rank(r), 5)).map(|s| s.end - s.start).collect();
        assert_eq!(sizes.iter().sum::<u64>(), 3);
        assert!(sizes.contains(&0));
    }

    proptest! {
        #[test]
        fn every_position_of_every_epoch_is_covered_exactly_once(
            samples in 1u64..500, batch in 1usize..70, epochs in 1u64..4, world in 1u32..20, micro in 1u64..9,
        ) {
            let plan = Plan::new(&train(batch, None, Some(epochs)), samples).unwrap();
            let mut seen = vec![vec![0u8; samples as usize]; epochs as usize];
            for step in 0..plan.total_steps() {
                let batch = plan.batch(Step(step));
                for rank in 0..world {
                    for chunk in micro_batches(batch.of_rank(Rank(rank), world), micro) {
                        prop_assert!(chunk.end - chunk.start <= micro && !chunk.is_empty());
                        for position in chunk {
                            seen[batch.epoch as usize][position as usize] += 1;
                        }
                    }
                }
            }
            prop_assert!(seen.iter().flatten().all(|&count| count == 1));
        }

        #[test]
        fn what_is_skipped_and_what_is_left_make_up_the_whole(
            start in 0u64..30, len in 0u64..40, skipped in prop::collection::vec((0u64..60, 0u64..10), 0..6),
        ) {
            let skipped: Vec<_> = skipped.into_iter().map(|(start, len)| start..start + len).collect();
            let left: Vec<u64> = without(start..start + len, &skipped).into_iter().flatten().collect();
            let due = (start..start + len).filter(|p| !skipped.iter().any(|hole| hole.contains(p)));
            prop_assert_eq!(left, due.collect::<Vec<_>>());
        }

        #[test]
        fn slices_are_in_rank_order_and_differ_by_at_most_one_sample(len in 0u64..u64::MAX, world in 1u32..200) {
            let mut next = 0;
            for rank in 0..world {
                let slice = slice(len, Rank(rank), world);
                prop_assert_eq!(slice.start, next);
                let size = slice.end - slice.start;
                prop_assert!(size == len / u64::from(world) || size == len / u64::from(world) + 1);
                next = slice.end;
            }
            prop_assert_eq!(next, len);
        }

        #[test]
        fn a_step_consumes_the_same_samples_at_any_world_size(
            samples in 1u64..500, batch in 1usize..70, step in 0u64..1000, world in 1u32..20,
        ) {
            let plan = Plan::new(&train(batch, Some(1000), None), samples).unwrap();
            let whole = plan.batch(Step(step));
            let parts: Vec<u64> = (0..world).flat_map(|r| whole.of_rank(Rank(r), world)).collect();
            prop_assert_eq!(parts, whole.positions.collect::<Vec<_>>());
        }
    }
}
