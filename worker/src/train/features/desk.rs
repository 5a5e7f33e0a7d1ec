//! What the other owners of a rank's training lend to its features.

use coxswain_nn::kernels::Tape;
use coxswain_proto::ids::{Bytes, Step};
use coxswain_task::Extractor;

use crate::train::{Facts, Feed, Learner, Members, TrainError};
use crate::{
    link::Phase,
    memory::{Meter, OutOfMemory, Overrun},
};

/// What [`Features`](super::Features) work with and do not own.
pub(in crate::train) struct Desk<'d, 'a, B: Tape<Base = B>> {
    pub run: &'d Facts<'a, B>,
    pub members: &'d mut Members,
    /// Features are computed with what learns, and never change it.
    pub learner: &'d Learner<B>,
    pub feed: &'d mut Feed,
    pub meter: &'d mut Meter,
    /// The next step to run.
    pub next: Step,
}

impl<'d, B: Tape<Base = B>> Desk<'d, '_, B> {
    /// Begins a phase: for heartbeats, and for memory peaks.
    pub fn enter(&mut self, phase: Phase, step: Step) -> Result<(), TrainError> {
        self.members.enter(self.meter, phase, step)
    }

    /// What may wait for the store's disk, in a phase of which the coordinator knows that; then the present
    /// phase goes on.
    pub fn storing(&mut self, step: Step, work: impl FnOnce(&mut Self)) -> Result<(), TrainError> {
        let phase = self.meter.phase();
        self.enter(Phase::CacheBuild, step)?;
        work(self);
        self.enter(phase, step)
    }

    /// What computes features. Borrowed from the learner, so that the rest of the desk stays free.
    pub fn extractor(&self) -> &'d dyn Extractor<B> {
        let learner = self.learner;
        learner.objective.extractor().expect("what is kept was computed by it")
    }

    /// One sample does not fit beside what is there; a smaller micro-batch leaves more room. `before` was in
    /// use before it was tried.
    pub fn does_not_fit(&self, step: Step, overrun: Overrun, before: u64) -> TrainError {
        let capacity = self.run.spec.memory.capacity.map(Bytes);
        TrainError::DoesNotFit {
            step,
            source: OutOfMemory::new(Phase::CacheBuild, overrun, before, capacity),
        }
    }
}
