//! What was left out so far: steps in a row, which ones, for checkpoints, and samples.

use std::collections::BTreeMap;

use coxswain_proto::{
    ids::Step,
    limits::MAX_SKIPS_IN_CHECKPOINT,
    report::{Skip, SkipCause},
};

use super::{left_out::LeftOut, loss_history::LossHistory};
use crate::link::StepReport;

/// What was left out.
#[derive(Debug, Default)]
pub(in crate::train) struct Skips {
    /// For their numbers, up to the newest step.
    pub in_a_row: u32,
    /// The newest, as this rank knows them: one that came later has those of the checkpoint it began with.
    pub newest: BTreeMap<Step, Skip>,
    /// Losses of the newest steps that were not.
    pub losses: LossHistory,
    /// Samples of which nothing is learned, in steps that were taken.
    pub samples: LeftOut,
}

impl Skips {
    /// Counts a step that is done, and keeps for checkpoints that it was left out, or its loss.
    pub fn book(&mut self, done: &StepReport) {
        let StepReport { step, skipped, totals, .. } = done;
        self.in_a_row = match skipped.as_ref().map(|skipped| skipped.cause) {
            None => 0,
            Some(SkipCause::Asked | SkipCause::Overflow) => self.in_a_row,
            Some(SkipCause::Loss | SkipCause::Gradient | SkipCause::Spike) => self.in_a_row + 1,
        };
        match skipped {
            Some(skipped) => self.newest.extend([(*step, skipped.clone())]),
            None => self.losses.book(*step, totals.mean_loss()),
        }
        while self.newest.len() > MAX_SKIPS_IN_CHECKPOINT {
            self.newest.pop_first();
        }
    }
}
