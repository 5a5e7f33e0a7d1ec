//! What one rank trains with, in values that each own a part of it.
//!
//! ```text
//! run        what does not change: specification, plan, task, where checkpoints are
//! members    place, line to the control plane, communicator
//! learner    objective, trainables, gradients, optimizer
//! feed       samples, the threads that read them, the micro-batch
//! features   what is kept of the model below its tap
//! skips      steps and samples that were left out, and the losses of those that were not
//! stats      memory and speed, for tables and the summary
//! ```

use coxswain_nn::{kernels::Tape, params::Group};
use coxswain_proto::{ids::Step, run_spec::CacheMode};

use super::{Claim, Desk, Facts, Features, Feed, Learner, Members, RunStats, Skips, TrainError};
use crate::link::{CachePhase, Phase};

/// What one rank trains with; lives on the trainer thread. Rooms that need one or two of its owners are given
/// those; only what runs a step, or all of a checkpoint, is lent the whole.
pub(super) struct Workbench<'a, B: Tape<Base = B>> {
    pub run: Facts<'a, B>,
    pub members: Members,
    pub learner: Learner<B>,
    pub feed: Feed,
    /// Features that are kept; none if the cache is off.
    pub features: Option<Features<B>>,
    pub skips: Skips,
    pub stats: RunStats,
    /// The next step to run.
    pub next: Step,
}

impl<B: Tape<Base = B>> Workbench<'_, B> {
    /// Begins a phase: for heartbeats, and for memory peaks.
    pub fn enter(&mut self, phase: Phase, step: Step) -> Result<(), TrainError> {
        self.members.enter(&mut self.stats.meter, phase, step)
    }

    /// Lets the kept features work, with what the other owners lend them. Nothing happens if the cache is
    /// off.
    pub fn with_features(
        &mut self,
        work: impl FnOnce(&mut Features<B>, &mut Desk<'_, '_, B>) -> Result<(), TrainError>,
    ) -> Result<(), TrainError> {
        let Some(features) = &mut self.features else { return Ok(()) };
        let mut desk = Desk {
            run: &self.run,
            members: &mut self.members,
            learner: &self.learner,
            feed: &mut self.feed,
            meter: &mut self.stats.meter,
            next: self.next,
        };
        work(features, &mut desk)
    }

    /// What stays as it is in the step that runs: the adapter, where features come from a generation that it
    /// made.
    pub fn resting(&self) -> Option<Group> {
        let cached =
            matches!(self.feed.claimed.front(), Some(Claim { cache_phase: CachePhase::Cached(_), .. }));
        let periodic = cached && self.run.spec.cache.mode == CacheMode::Periodic;
        self.learner.objective.extractor().filter(|_| periodic).map(|extractor| extractor.resting())
    }
}
