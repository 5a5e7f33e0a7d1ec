//! Everything one rank trains with, in values that each own a part of it.
//!
//! ```text
//! run        what does not change: specification, plan, task
//! members    place, line to the control plane, communicator
//! learner    objective, trainables, gradients, optimizer
//! feed       samples, the threads that read them, the micro-batch
//! features   what is kept of the model below its tap
//! stats      memory and speed, for tables and the summary
//! ```

use coxswain_nn::kernels::Tape;
use coxswain_proto::ids::Step;

use super::{
    TrainError,
    checkpoint::Store,
    facts::Facts,
    features::{Desk, Features},
    feed::Feed,
    held_out::{HeldOutError, Validation},
    learner::Learner,
    members::Members,
    skips::Skips,
    stats::RunStats,
};
use crate::link::{Commands, Phase};

/// Everything one rank trains with. Built by [`TaskTrainer`](super::TaskTrainer); lives on the trainer
/// thread.
pub(super) struct Training<'a, B: Tape<Base = B>> {
    pub run: Facts<'a, B>,
    pub members: Members,
    pub learner: Learner<B>,
    pub feed: Feed,
    /// Features that are kept; none if the cache is off.
    pub features: Option<Features<B>>,
    pub stats: RunStats,
    pub store: Store,
    /// The next step to run.
    pub next: Step,
    /// Requests obeyed so far, to tell a new one from an old one.
    pub obeyed: Commands,
    /// The step of the newest checkpoint of this run.
    pub saved: Option<Step>,
    /// The held-out error before the first step, once it has been looked at.
    pub before: Option<Option<HeldOutError>>,
    /// What was found on held-out samples while training.
    pub validation: Validation,
    /// Whether all ranks have agreed to stop before the last step.
    pub stopped: bool,
    /// Steps and samples that were left out.
    pub skips: Skips,
    /// Whether the run was described in the log.
    pub announced: bool,
}

impl<B: Tape<Base = B>> Training<'_, B> {
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
}
