//! A run in which the samples that cannot be used are too many ends, and says so. So does one that has
//! learned nothing at all, whatever its steps were left out for.
//!
//! Steps that are left out as a whole do not count here: of those in a row `train.max_skipped` is the limit.

use coxswain_nn::kernels::Tape;
use coxswain_proto::ids::{Rank, Step};

use super::left_out::{ENOUGH, LeftOut};
use crate::train::{Facts, Feed, Members, TrainError};
use crate::{
    collective::{BufMut, Reduce},
    link::StepReport,
};

/// Bytes of causes that travel.
const TEXT: usize = 600;

impl LeftOut {
    /// A generation begins with the step `next`: counts what lies before it, as far as it is judged.
    pub fn recount<B: Tape<Base = B>>(
        &mut self,
        run: &Facts<'_, B>,
        members: &Members,
        feed: &Feed,
        next: Step,
    ) {
        let window = ENOUGH.min(run.plan.samples());
        let (mut seen, mut left_out, mut step) = (0, 0, next);
        while step.0 > 0 && seen < window {
            step = Step(step.0 - 1);
            let [samples, learned] = shares(run, members, feed, step);
            (seen, left_out) = (seen + samples, left_out + samples - learned);
        }
        self.begin(next, [left_out, seen]);
    }

    /// Counts a step that is done, and refuses to go on where too much is left out.
    pub fn count<B: Tape<Base = B>>(
        &mut self,
        run: &Facts<'_, B>,
        members: &mut Members,
        feed: &Feed,
        done: &StepReport,
    ) -> Result<(), TrainError> {
        if done.skipped.is_some() {
            return Ok(());
        }
        let [samples, learned] = shares(run, members, feed, done.step);
        self.add(samples, learned);
        let share = run.spec.train.max_left_out;
        if !self.is_too_many(run.plan.samples(), share) {
            return Ok(());
        }
        let (left_out, seen) = (self.left_out, self.seen);
        Err(TrainError::TooMuchLeftOut { left_out, seen, share, causes: self.tell_causes(members)? })
    }

    /// Refuses a run that has done all its steps and learned nothing.
    pub fn require(&self, members: &mut Members, next: Step) -> Result<(), TrainError> {
        let first = self.first.unwrap_or(next);
        let mut told = [f64::from(u8::from(self.learned)), -(first.0 as f64)];
        members.comm.all_reduce(BufMut::F64(&mut told), Reduce::Max)?;
        let (learned, first) = (told[0] > 0.0, -told[1]);
        if learned || first > 0.0 || next == Step(0) {
            return Ok(());
        }
        Err(TrainError::NothingLearned { steps: next, causes: self.tell_causes(members)? })
    }

    /// Why the first samples could not be used, as the first rank that knows tells all.
    fn tell_causes(&self, members: &mut Members) -> Result<String, TrainError> {
        let own = self.causes.join("; ");
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
}

/// Samples of a step, and of these those that can be used.
fn shares<B: Tape<Base = B>>(run: &Facts<'_, B>, members: &Members, feed: &Feed, step: Step) -> [u64; 2] {
    let (batch, quarantined) = (run.plan.batch(step), &members.assignment.quarantined);
    let samples = batch.len();
    let usable = feed.usable(run.spec.run.seed, quarantined, batch.epoch, batch.positions);
    [samples, usable.iter().map(|range| range.end - range.start).sum()]
}
