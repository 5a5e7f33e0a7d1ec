//! The policy trainer: what a session runs on its trainer thread.

use std::{panic, path::PathBuf, sync::Arc, thread};

use coxswain_proto::{document, ids::Step, plan::Plan, run_spec::RunSpec};

use super::{TrainError, checkpoint::Store, run::Training};
use crate::{
    collective::{Collective, Membership, Ring, RingListener, Solo},
    data::{Dataset, Prefetcher},
    kernels::Tape,
    link::{Assignment, Commands, Link, LinkError, Phase, Report},
    memory::{Meter, Resident},
    model::policy::Policy,
    params::{FlatGrads, Trainables},
    trainer::{DataSetFacts, Trainer, TrainerFailure, TrainerOutcome},
    zero::ShardedAdamW,
};

/// What a trainer is given besides the run spec.
pub struct TrainerOptions<B: Tape<Base = B>> {
    /// Where tensors live.
    pub device: B::Device,
    /// Accepts this rank's ring neighbour; none for a world of one.
    pub listener: Option<RingListener>,
    /// Names the ring's members: a neighbour of another run is refused.
    pub run_id: String,
}

/// Trains the policy of a run spec on backend `B`.
pub struct PolicyTrainer<B: Tape<Base = B>> {
    options: TrainerOptions<B>,
    dataset: Option<Arc<Dataset>>,
}

impl<B: Tape<Base = B>> PolicyTrainer<B> {
    /// A trainer that has read nothing yet.
    pub fn new(options: TrainerOptions<B>) -> Self {
        Self { options, dataset: None }
    }
}
