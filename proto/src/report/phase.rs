//! What a worker is doing, where its state is from, and the memory it takes.

use std::fmt;

use serde::{Deserialize, Serialize};
use strum::IntoStaticStr;

use crate::ids::Bytes;

/// What a worker is doing, for heartbeats, memory peaks and failures. In the order in which tables show them.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, IntoStaticStr,
)]
#[strum(serialize_all = "lowercase")]
pub enum WorkerPhase {
    /// Launcher starts its process, which has not made itself known yet: the coordinator's to say.
    Starting,
    /// Waiting for the world to be complete.
    #[default]
    Joining,
    /// Reading the checkpoint and the data set's metadata.
    Loading,
    /// Forming the ring.
    Connecting,
    /// Waiting for data.
    Data,
    /// Forward pass.
    Forward,
    /// Backward pass.
    Backward,
    /// In a collective.
    Communication,
    /// Optimizer step.
    Optimizer,
    /// Writing or reading a checkpoint.
    Checkpoint,
    /// Filling the feature cache.
    #[strum(to_string = "cache build")]
    CacheBuild,
    /// Held-out evaluation.
    Evaluation,
    /// Waiting for `resume`.
    Paused,
    /// Nothing more to do.
    Done,
}

impl WorkerPhase {
    /// The phases that a worker is in by its own account, in order.
    pub const ALL: [Self; 13] = [
        Self::Joining,
        Self::Loading,
        Self::Connecting,
        Self::Data,
        Self::Forward,
        Self::Backward,
        Self::Communication,
        Self::Optimizer,
        Self::Checkpoint,
        Self::CacheBuild,
        Self::Evaluation,
        Self::Paused,
        Self::Done,
    ];

    /// Whether it comes before the first step of a generation.
    pub fn is_before_steps(self) -> bool {
        matches!(self, Self::Starting | Self::Joining | Self::Loading | Self::Connecting)
    }

    /// In lower case, as files and a worker's messages have it.
    pub fn name(self) -> &'static str {
        self.into()
    }

    /// As a noun, for the log: `lost: rank 1, load: no such file`.
    pub fn noun(self) -> &'static str {
        match self {
            Self::Starting => "start",
            Self::Loading => "load",
            Self::Connecting => "connect",
            other => other.name(),
        }
    }
}

impl fmt::Display for WorkerPhase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.noun())
    }
}

/// Where the ranks of a generation had their state from; the later, the dearer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, strum::Display)]
#[strum(serialize_all = "lowercase")]
pub enum StateSource {
    /// The run begins.
    Fresh,
    /// Living ranks had all of it.
    #[strum(to_string = "kept by the ranks")]
    Carried,
    /// A lost rank's part came from its replica on another rank.
    #[serde(rename = "Mirror")]
    Replica,
    /// Read from the newest checkpoint.
    Checkpoint,
}

/// Peaks of one phase on one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PhaseMemory {
    /// Which phase.
    pub phase: WorkerPhase,
    /// Allocator, in use.
    pub in_use: Bytes,
    /// Allocator, reserved.
    pub reserved: Bytes,
    /// Driver, or resident set.
    pub driver: Bytes,
}

/// How a checkpoint is getting on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CheckpointState {
    /// Manifest is published: it can be resumed from.
    Complete,
    /// It was given up; training goes on.
    Failed,
}
