//! What a rank of a run will hold, as far as its task has to say it: before launch, from sizes alone.

use coxswain_proto::{memory::Category, run_spec::RunSpec};
use serde::Serialize;

use crate::TaskError;

/// Bytes for each element of a shard that the replica of the neighbour's takes: its weights and both moments.
pub const MIRROR_BYTES: u64 = 12;

/// Bytes that a ring keeps to receive into.
pub const RECEIVE_BYTES: u64 = 128 << 10;

/// Where a rank's memory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// The host's: what the allocator counts. Weights whose type is the file's own stay in the page cache.
    Host {
        /// Compute threads of the rank.
        threads: u64,
    },
    /// A GPU's: everything is on it.
    Card,
}

/// One rank of a world.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ask {
    /// Samples of one forward pass.
    pub micro_batch: u64,
    /// Ranks.
    pub world: u64,
    /// Which of them.
    pub rank: u64,
    /// Where its memory is.
    pub place: Place,
}

/// What one rank will hold at its worst moment, by category.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Prediction {
    by: [u64; Category::ALL.len()],
    /// Peak of activations in the forward pass.
    pub forward: u64,
    /// What of it the backward pass needs.
    pub kept: u64,
    /// Peak of activations in the backward pass.
    pub backward: u64,
}

impl Prediction {
    /// What a pass holds, and nothing else yet.
    pub fn of_pass(forward: u64, kept: u64, backward: u64) -> Self {
        Self { forward, kept, backward, ..Self::default() }
    }

    /// Bytes of a category.
    pub fn of(&self, category: Category) -> u64 {
        self.by[category as usize]
    }

    /// Sets the bytes of a category.
    pub fn set(&mut self, category: Category, bytes: u64) {
        self.by[category as usize] = bytes;
    }

    /// Everything together.
    pub fn peak(&self) -> u64 {
        self.by.iter().sum()
    }

    /// What is there whatever the micro-batch.
    pub fn fixed(&self) -> u64 {
        self.peak() - self.of(Category::Activations) - self.of(Category::Input)
    }
}

/// A setting, and what it would do to a rank's peak.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Lever {
    /// What it is.
    pub what: String,
    /// How to pull it: an override of the run file.
    pub setting: String,
    /// Bytes less at the peak; negative where it would take more.
    pub saves: i64,
    /// What it costs, or why it saves nothing.
    pub remark: String,
}

/// What is predicted about: a run, and the sizes of its model and data. Nothing of either has been loaded.
pub trait Subject {
    /// The run.
    fn spec(&self) -> &RunSpec;

    /// Names the model: what is learned from runs of one says nothing about another.
    fn model(&self) -> String;

    /// Predicts one rank.
    fn predict(&self, ask: Ask) -> Prediction;

    /// What is held in host memory beside a GPU.
    fn beside_card(&self, ask: Ask) -> u64;

    /// Every setting that is not yet as frugal as it can be.
    fn levers(&self, ask: Ask) -> Vec<Lever>;

    /// For people: what is frozen, what trains, how large a sample is. Label and text of a line each.
    fn describe(&self) -> Vec<(&'static str, String)>;

    /// In a few words, how precise activations are, where it is not the default.
    fn precision(&self) -> Option<&'static str> {
        None
    }

    /// The same for programs.
    fn to_json(&self) -> serde_json::Value;

    /// The same model and data under changed settings.
    fn changed(&self, change: &dyn Fn(&mut RunSpec)) -> Result<Box<dyn Subject>, TaskError>;
}
