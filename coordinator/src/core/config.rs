//! What a run is made from.

use std::collections::BTreeMap;

use coxswain_proto::{
    ids::Step,
    report::Skip,
    run_spec::{Cache, Faults, Train},
};

use super::{checkpoints::CheckpointEntry, past::Past};
use crate::options::{Budgets, Patience, World};

/// What a machine is made from.
#[derive(Clone, Debug)]
pub struct Config {
    /// Names the run among runs.
    pub run_id: String,
    /// What workers' versions must equal.
    pub version: String,
    /// How long, in which batches.
    pub train: Train,
    /// Where features come from.
    pub cache: Cache,
    /// Whether ranks keep replicas of each other's optimizer shards, and when a slot is not used any more.
    pub faults: Faults,
    /// How many workers.
    pub world: World,
    /// Bounds on waiting.
    pub patience: Patience,
    /// Bounds on trying again.
    pub budgets: Budgets,
    /// `run.seed`: with the data set it decides the order of samples.
    pub seed: u64,
    /// Starts of the coordinator for this run, from 1.
    pub life: u32,
    /// True when this coordinator takes the place of one that was lost a moment ago.
    pub restarted: bool,
    /// The launcher that hosted that one, if it is gone with its machine.
    pub in_place_of: Option<String>,
    /// What earlier lives have recorded.
    pub past: Past,
    /// Checkpoints on disk now; what was there once does not count.
    pub checkpoints: Vec<CheckpointEntry>,
    /// Steps of which these say that they were left out.
    pub skipped: BTreeMap<Step, Skip>,
}
