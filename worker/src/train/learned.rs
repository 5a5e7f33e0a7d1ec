//! A run in which the samples that cannot be used are too many ends, and says so. So does one that has
//! learned nothing at all, whatever its steps were left out for.
//!
//! Steps that are left out as a whole do not count here: of those in a row `train.max_skipped` is the limit.

use coxswain_nn::kernels::Tape;
use coxswain_proto::ids::{Rank, Step};

use super::{TrainError, left_out::LeftOut, training::Training};
use crate::{
    collective::{BufMut, Reduce},
    link::StepReport,
};

/// Bytes of causes that travel.
const TEXT: usize = 600;

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
    training.skips.samples.add(samples, learned);
    let share = training.run.spec.train.max_left_out;
    if !training.skips.samples.is_too_many(training.run.plan.samples(), share) {
        return Ok(());
    }
    let LeftOut { seen, left_out, .. } = training.skips.samples;
    Err(TrainError::TooMuchLeftOut { left_out, seen, share, causes: causes(training)? })
}

/// Refuses a run that has done all its steps and learned nothing.
pub(super) fn require<B: Tape<Base = B>>(training: &mut Training<'_, B>) -> Result<(), TrainError> {
    let LeftOut { first, learned, .. } = training.skips.samples;
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
    let (own, members) = (training.skips.samples.causes.join("; "), &mut training.members);
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
