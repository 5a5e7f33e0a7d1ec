//! The largest micro-batch that fits, found by trying (`train.auto_micro_batch`, `cox run
//! --auto-batch-size`).
//!
//! ```text
//! rungs     samples of a rank's slice, in 1, 2, 4, .. passes of equal size so the global batch is met
//!           exactly, whatever is found
//! trial     forward and backward of that many real samples, guarded; its gradients are dropped
//! search    one sample first, then the highest rung that a line through the trials so far says will fit;
//!           once that was wrong, the middle of the rungs that are left; at most 6 trials
//! ```
//!
//! Every trial ends with one small all-gather: a size fits if it fits on all ranks, and the tightest rank
//! decides what is tried next. All ranks therefore try the same sizes and end with the same one. Checkpoints
//! carry it, so a resumed run does not search again.
//!
//! A rank that is lost in a trial, perhaps to the kernel because of it, ends the search. The next generation
//! searches again, up to half the size that was being tried: what it finds is what the run goes on with,
//! never the size of a trial.
//!
//! What a size takes includes the micro-batches of that size that are read ahead, and a tenth of the room is
//! left free: later samples may be longer. The bound is `memory.capacity`; without one, what the GPU has
//! free, or most of what the machine has, shared among its workers. A GPU's allocator does not tell its
//! peaks, but keeps what it once needed: what it has reserved after a trial that began with nothing spare is
//! the trial's peak, in whole pages. What this module does not do: look for the *fastest* size. On a CPU a
//! small micro-batch is often as fast.

use coxswain_proto::{human, ids::Rank};

use coxswain_nn::kernels::Tape;

use crate::train::{Lookout, TimeBreakdown, TrainError, Workbench};
use crate::{
    collective::{Buf, BufMut},
    link::{Phase, Report},
    memory::{OutOfMemory, Resident},
};

/// Trials at most.
const TRIALS: usize = 6;
/// The share of the room there is that a size may take.
const MARGIN: f64 = 0.9;
/// The share of the machine's free memory that may be used without `memory.capacity`.
const OF_FREE: f64 = 0.8;

/// What all ranks know after a trial.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Trial {
    size: usize,
    /// Bytes it took on the rank where it took most; none if it did not fit on some rank.
    took: Option<f64>,
    /// Bytes free before it on the rank with the least.
    room: f64,
}

/// The trials so far.
#[derive(Debug)]
pub(in crate::train) struct Search {
    /// Ascending.
    rungs: Vec<usize>,
    trials: Vec<Trial>,
}

impl Search {
    /// For ranks of at most `share` samples a step; sizes above `most` are not tried.
    fn new(share: usize, most: usize) -> Self {
        let mut rungs: Vec<usize> =
            std::iter::successors(Some(1), |passes| (passes * 2 <= share.max(1)).then_some(passes * 2))
                .map(|passes| share.max(1).div_ceil(passes))
                .filter(|size| *size <= most)
                .collect();
        rungs.push(1);
        rungs.sort_unstable();
        rungs.dedup();
        Self { rungs, trials: Vec::new() }
    }

    /// The largest size that has fitted with a margin; without one, a single sample if it has fitted.
    fn best(&self) -> Option<usize> {
        let fitted = |trial: &&Trial| {
            trial.took.is_some_and(|took| took <= MARGIN * trial.room || trial.size == self.rungs[0])
        };
        self.trials.iter().filter(fitted).map(|trial| trial.size).max()
    }

    /// The next size to try.
    fn next(&self) -> Option<usize> {
        let Some(last) = self.trials.last() else { return self.rungs.first().copied() };
        let best = self.best()?;
        let failed = self.trials.iter().map(|trial| trial.size).filter(|size| *size > best).min();
        let room = MARGIN * last.room;
        let open = |size: &&usize| **size > best && failed.is_none_or(|failed| **size < failed);
        let open: Vec<usize> = self.rungs.iter().filter(open).copied().collect();
        let next = match failed {
            None => open.iter().rfind(|size| self.expected(**size) <= room),
            // What was expected to fit did not: the line is no guide any more.
            Some(_) => open.get(open.len() / 2),
        };
        next.copied().filter(|_| self.trials.len() < TRIALS)
    }

    /// Bytes that a size will take: on the line through the smallest and the largest that fitted, or through
    /// the origin.
    fn expected(&self, size: usize) -> f64 {
        let points = self.trials.iter().filter_map(|trial| Some((trial.size as f64, trial.took?)));
        let by_size = |a: &(f64, f64), b: &(f64, f64)| a.0.total_cmp(&b.0);
        let (Some(low), Some(high)) = (points.clone().min_by(by_size), points.max_by(by_size)) else {
            return 0.0;
        };
        if low.0 == high.0 {
            return high.1 / high.0 * size as f64;
        }
        let slope = (high.1 - low.1) / (high.0 - low.0);
        high.1 + slope * (size as f64 - high.0)
    }

    /// For people: what was tried, and what it took.
    fn told(&self) -> String {
        let one = |trial: &Trial| match trial.took {
            Some(took) => format!("{} ({})", trial.size, human::bytes(took as u64)),
            None => format!("{} (does not fit)", trial.size),
        };
        self.trials.iter().map(one).collect::<Vec<_>>().join(", ")
    }

    /// Finds the micro-batch for a run that begins, together with all ranks.
    pub fn find_micro_batch<B: Tape<Base = B>>(bench: &mut Workbench<'_, B>) -> Result<(), TrainError> {
        let capacity = bench.run.spec.memory.capacity;
        let limit = capacity.unwrap_or_else(|| machines_share(bench));
        bench.stats.meter.bound(Some(limit));
        let most = bench.feed.micro_batch;
        let found = Self::run(bench, limit, most);
        bench.stats.meter.release();
        bench.stats.meter.bound(capacity);
        bench.stats.meter.begin_step();
        let (search, last) = found?;
        let Some(size) = search.best() else {
            let source = last.unwrap_or_else(|| bench.stats.meter.out_of_memory(Phase::Forward, 0, 0));
            return Err(TrainError::Exhausted {
                step: bench.next,
                source: source.into(),
                advice: bench.run.advice(),
            });
        };
        (bench.feed.micro_batch, bench.feed.searched) = (size, true);
        if bench.members.rank().0 == 0 {
            let share = bench.run.share(bench.members.world());
            let bounded = match most < share {
                true => format!(" (at most {most}: a rank was lost while a larger micro-batch was tried)"),
                false => String::new(),
            };
            bench.members.link.report(Report::Note(format!(
                "micro-batch found: {size} (passes per step on each rank: {}; train.global_batch: {}); tried {}{bounded}",
                share.div_ceil(size),
                bench.run.spec.train.global_batch,
                search.told()
            )))?;
        }
        Ok(())
    }

    fn run<B: Tape<Base = B>>(
        bench: &mut Workbench<'_, B>,
        limit: u64,
        most: usize,
    ) -> Result<(Self, Option<OutOfMemory>), TrainError> {
        let mut search = Self::new(bench.run.share(bench.members.world()), most);
        let mut last = None;
        while let Some(size) = search.next() {
            let (trial, refused) = match trial(bench, size, limit) {
                Err(TrainError::Collective(error)) => {
                    bench.feed.micro_batch = most.min(size / 2).max(1);
                    tracing::warn!(size, %error, "a rank was lost while this micro-batch was tried; the next trial is at most half of it");
                    return Err(error.into());
                }
                tried => tried?,
            };
            last = refused.or(last);
            search.trials.push(trial);
        }
        Ok((search, last))
    }
}

/// Tries a size together with all ranks. Also returns why it does not fit, if it is this rank that it
/// does not fit on.
fn trial<B: Tape<Base = B>>(
    bench: &mut Workbench<'_, B>,
    size: usize,
    limit: u64,
) -> Result<(Trial, Option<OutOfMemory>), TrainError> {
    bench.stats.meter.release();
    let before = bench.stats.meter.in_use().0;
    let (own, failed, refused) = match try_size(bench, size) {
        Ok(took) => ([took as f64, 0.0], None, None),
        Err(TrainError::DoesNotFit { source, .. }) => ([0.0, 1.0], None, Some(source)),
        Err(other) => ([0.0, 2.0], Some(other), None),
    };
    let room = limit.saturating_sub(before) as f64;
    let mut all = vec![0.0; 3 * bench.members.comm.world()];
    bench.members.comm.all_gather(Buf::F64(&[own[0], own[1], room]), BufMut::F64(&mut all))?;
    if let Some(error) = failed {
        return Err(error);
    }
    if let Some((_, rank)) = all.chunks_exact(3).zip(0..).find(|(row, _)| row[1] == 2.0) {
        return Err(TrainError::PeerFailed(Rank(rank)));
    }
    let worst = |field: usize| all.chunks_exact(3).map(|row| row[field]).fold(0.0, f64::max);
    let took = (worst(1) == 0.0).then(|| worst(0));
    let room = all.chunks_exact(3).map(|row| row[2]).fold(f64::INFINITY, f64::min);
    Ok((Trial { size, took, room }, refused))
}

/// One guarded pass over `size` samples of the next step; returns the bytes it took.
fn try_size<B: Tape<Base = B>>(bench: &mut Workbench<'_, B>, size: usize) -> Result<u64, TrainError> {
    let (step, before) = (bench.next, bench.stats.meter.in_use().0);
    let samples = bench.feed.first_samples(&bench.run, &bench.members, step, size)?;
    if samples.is_empty() {
        return Ok(0);
    }
    let micro_batch = bench.feed.samples.batch(step, &samples);
    bench.learner.grads.zero();
    // One at a time is not refused on a prediction: that is what a trial is for.
    let bound = std::mem::replace(&mut bench.feed.micro_batch, 1);
    let lookout = Lookout::for_ranks(bench.members.comm.as_ref());
    let passed = bench.pass(lookout, step, &*micro_batch, &mut TimeBreakdown::default());
    bench.feed.micro_batch = bound;
    // What its numbers are is for the step to judge.
    passed.map(drop).or_else(|error| if error.is_not_finite() { Ok(()) } else { Err(error) })?;
    let took = bench.stats.meter.last_took();
    Ok(match bench.stats.meter.reserved() {
        Some(reserved) => took.max(reserved.saturating_sub(before)),
        // In a step, the data threads hold others of its size meanwhile.
        None => took + micro_batch.bytes() * (1 + bench.run.spec.data.prefetch as u64),
    })
}

/// What this worker may hold if nothing bounds it but the machine or its GPU.
fn machines_share<B: Tape<Base = B>>(bench: &Workbench<'_, B>) -> u64 {
    if let Some(room) = bench.stats.meter.room() {
        return bench.stats.meter.in_use().0 + room;
    }
    let workers = bench.run.spec.launch.nproc_per_node.unwrap_or(bench.members.world() as usize).max(1);
    let free = Resident::free_on_this_machine() as f64 * OF_FREE / workers as f64;
    bench.stats.meter.in_use().0 + free as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Searches where a size takes `fixed + each * size` bytes of `room`.
    fn found(share: usize, fixed: f64, each: f64, room: f64) -> (Option<usize>, usize) {
        let mut search = Search::new(share, share);
        while let Some(size) = search.next() {
            let takes = fixed + each * size as f64;
            search.trials.push(Trial { size, took: (takes <= room).then_some(takes), room });
        }
        (search.best(), search.trials.len())
    }

    #[test]
    fn sizes_are_equal_cuts_of_a_ranks_slice() {
        assert_eq!(Search::new(16, 16).rungs, [1, 2, 4, 8, 16]);
        assert_eq!(Search::new(12, 64).rungs, [1, 2, 3, 6, 12]);
        assert_eq!(Search::new(1, 1).rungs, [1]);
    }

    #[test]
    fn what_a_rank_was_lost_with_is_not_tried_again() {
        assert_eq!(Search::new(16, 8).rungs, [1, 2, 4, 8]);
        assert_eq!(Search::new(12, 5).rungs, [1, 2, 3]);
        assert_eq!(Search::new(12, 1).rungs, [1]);
    }

    #[test]
    fn the_largest_size_that_fits_is_found_within_six_trials() {
        for share in [1, 7, 16, 48, 100, 256, 4096] {
            for room in [50.0, 120.0, 333.0, 1000.0, 5000.0, 1e9] {
                for fixed in [0.0, 40.0] {
                    let (found, trials) = found(share, fixed, 10.0, room);
                    let fits = |size: &usize| fixed + 10.0 * *size as f64 <= room;
                    // A size that would fill the margin is not tried.
                    let safe = |size: &usize| fixed + 10.0 * *size as f64 <= MARGIN * room;
                    let rungs = Search::new(share, share).rungs;
                    assert!(trials <= TRIALS, "{share} {room} {fixed}");
                    assert!(
                        found >= rungs.iter().copied().filter(safe).max(),
                        "{share} {room} {fixed}: {found:?}"
                    );
                    assert!(found <= rungs.iter().copied().filter(|size| safe(size) || *size == 1).max());
                    assert_eq!(found.is_some(), fits(&1));
                }
            }
        }
    }

    #[test]
    fn where_small_sizes_say_nothing_of_large_ones_the_rungs_are_halved() {
        // An allocator that has pages to spare for a single sample.
        let mut search = Search::new(256, 256);
        while let Some(size) = search.next() {
            let takes = if size == 1 { 0.1 } else { 2.5 * size as f64 };
            search.trials.push(Trial { size, took: (takes <= 100.0).then_some(takes), room: 100.0 });
        }
        let tried: Vec<_> = search.trials.iter().map(|trial| trial.size).collect();
        assert_eq!((search.best(), &tried[..]), (Some(32), &[1, 256, 16, 64, 32][..]));
    }

    #[test]
    fn nothing_is_found_where_one_sample_does_not_fit() {
        assert_eq!(found(16, 0.0, 100.0, 50.0), (None, 1));
    }
}
