//! Samples that cannot be used: a run in which they are too many ends, and says so. So does one that has
//! learned nothing at all, whatever its steps were left out for.
//!
//! ```text
//! counted   from the beginning of a generation on, so that all ranks count the same
//! judged    over at least 1,000 samples, or an epoch where that has fewer
//! too many  more than train.max_left_out of them
//! ```
//!
//! Steps that are left out as a whole do not count here: of those in a row `train.max_skipped` is the limit.

use coxswain_nn::kernels::Tape;
use coxswain_proto::ids::{Rank, Step};

use super::{TrainError, training::Training};
use crate::{
    collective::{BufMut, Reduce},
    link::StepReport,
};

/// Samples over which a share means something.
const ENOUGH: u64 = 1000;
/// Causes that are kept.
const CAUSES: usize = 3;
/// Bytes of them that travel.
const TEXT: usize = 600;

/// What was seen of the data, and what was learned from.
#[derive(Debug, Default)]
pub(super) struct LeftOut {
    /// Samples of this generation's steps.
    seen: u64,
    /// Of these, those of which nothing was learned.
    left_out: u64,
    /// The first step of this process.
    first: Option<Step>,
    /// Whether any step of this process has learned anything.
    learned: bool,
    /// Why the first samples of this rank could not be used.
    causes: Vec<String>,
}

impl LeftOut {
    /// A generation begins with this step.
    pub fn begin(&mut self, next: Step) {
        (self.seen, self.left_out) = (0, 0);
        self.first.get_or_insert(next);
    }

    /// A sample of this rank cannot be used.
    pub fn note(&mut self, cause: &str) {
        if self.causes.len() < CAUSES {
            self.causes.push(cause.to_owned());
        }
    }

    fn add(&mut self, samples: u64, learned: u64) {
        self.seen += samples;
        self.left_out += samples - learned;
        self.learned |= learned > 0;
    }

    fn is_too_many(&self, epoch: u64, share: f64) -> bool {
        self.seen >= ENOUGH.min(epoch) && self.left_out as f64 > share * self.seen as f64
    }
}

/// Counts a step that is done, and refuses to go on where too much is left out.
pub(super) fn count<B: Tape<Base = B>>(
    training: &mut Training<'_, B>,
    done: &StepReport,
) -> Result<(), TrainError> {
    let batch = training.run.plan.batch(done.step);
    if done.skipped.is_some() {
        return Ok(());
    }
    let (samples, seed) = (batch.len(), training.run.spec.run.seed);
    let quarantined = &training.members.assignment.quarantined;
    let usable = training.feed.usable(seed, quarantined, batch.epoch, batch.positions);
    let learned = usable.iter().map(|range| range.end - range.start).sum();
    training.left_out.add(samples, learned);
    let share = training.run.spec.train.max_left_out;
    if !training.left_out.is_too_many(training.run.plan.samples(), share) {
        return Ok(());
    }
    let LeftOut { seen, left_out, .. } = training.left_out;
    Err(TrainError::TooMuchLeftOut { left_out, seen, share, causes: causes(training)? })
}

/// Refuses a run that has done all its steps and learned nothing.
pub(super) fn require_learned<B: Tape<Base = B>>(training: &mut Training<'_, B>) -> Result<(), TrainError> {
    let LeftOut { first, learned, .. } = training.left_out;
    let first = first.unwrap_or(training.next);
    let mut told = [f64::from(u8::from(learned)), -(first.0 as f64)];
    training.members.comm.all_reduce(BufMut::F64(&mut told), Reduce::Max)?;
    let (learned, first) = (told[0] > 0.0, -told[1]);
    if learned || first > 0.0 || training.next == Step(0) {
        return Ok(());
    }
    Err(TrainError::NothingLearned { steps: training.next, causes: causes(training)? })
}

/// Why the first samples could not be used, as the first rank that knows tells all.
fn causes<B: Tape<Base = B>>(training: &mut Training<'_, B>) -> Result<String, TrainError> {
    let (own, members) = (training.left_out.causes.join("; "), &mut training.members);
    let rank = members.rank();
    let mut knows = [if own.is_empty() { f64::NEG_INFINITY } else { -f64::from(rank.0) }];
    members.comm.all_reduce(BufMut::F64(&mut knows), Reduce::Max)?;
    if knows[0] == f64::NEG_INFINITY {
        return Ok("the log says why".to_owned());
    }
    let teller = Rank(-knows[0] as u32);
    let mut text = [0.0; TEXT];
    if teller == rank {
        text.iter_mut().zip(own.bytes()).for_each(|(place, byte)| *place = f64::from(byte));
    }
    members.comm.broadcast(BufMut::F64(&mut text), teller)?;
    let bytes: Vec<u8> = text.iter().map(|byte| *byte as u8).take_while(|byte| *byte > 0).collect();
    Ok(format!("the first: {}", String::from_utf8_lossy(&bytes)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_judged_over_enough_samples() {
        let mut count = LeftOut::default();
        count.begin(Step(0));
        count.add(100, 0);
        assert!(!count.is_too_many(5_000, 0.05), "too few to tell");
        assert!(count.is_too_many(80, 0.05), "more than an epoch");
        count.add(1_900, 1_900);
        assert!(!count.is_too_many(5_000, 0.05), "5 % of 2,000");
        count.add(10, 9);
        assert!(!count.is_too_many(5_000, 0.06) && count.is_too_many(5_000, 0.05));
        count.begin(Step(20));
        assert!(!count.is_too_many(80, 0.0) && count.first == Some(Step(0)) && count.learned);
    }
}
