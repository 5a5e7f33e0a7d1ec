//! Where the weights of repeated blocks are: all held, read when they run, or a part on each rank; and where
//! the table of token embeddings is.

use coxswain_nn::sharded::Cut;
use coxswain_proto::run_spec::{Offload, RunSpec, Shard};

/// How a model is loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockWeights {
    /// Every block is held.
    Held,
    /// None is: each is read from the files when it runs (`memory.offload: layers`).
    Streamed,
    /// A part of each is, once the ranks are known; the rest is gathered when a block runs (`memory.shard:
    /// frozen`). Until then as [`BlockWeights::Streamed`].
    Sharded,
}

impl BlockWeights {
    /// As a run asks for it.
    pub fn from_spec(spec: &RunSpec) -> Self {
        match (spec.memory.offload, spec.memory.shard) {
            (Offload::Layers, _) => Self::Streamed,
            (_, Shard::Frozen) => Self::Sharded,
            _ => Self::Held,
        }
    }
}

/// What of repeated blocks is in memory at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InMemory {
    /// All of them.
    All,
    /// The one that runs and the next one.
    TwoBlocks,
    /// A part of each, and of two blocks everything where there are other ranks to gather from.
    Part(Cut),
}

impl InMemory {
    /// As a run asks for it, on a rank of this cut.
    pub fn from_spec(spec: &RunSpec, cut: Cut) -> Self {
        match BlockWeights::from_spec(spec) {
            BlockWeights::Held => Self::All,
            BlockWeights::Streamed => Self::TwoBlocks,
            BlockWeights::Sharded => Self::Part(cut),
        }
    }

    /// Whether blocks are brought to memory when they run.
    pub fn fetches(self) -> bool {
        match self {
            Self::All => false,
            Self::TwoBlocks => true,
            Self::Part(cut) => cut.is_shared(),
        }
    }
}

/// Where the table of token embeddings is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TablePlace {
    /// With the rest of the model.
    Device,
    /// In host memory (`memory.offload: embedding`). Where the file's type is the one it is kept in, that is
    /// the mapped file: all ranks of a machine have one of it.
    Host,
}

impl TablePlace {
    /// As a run asks for it.
    pub fn from_spec(spec: &RunSpec) -> Self {
        if spec.memory.offload == Offload::Embedding { Self::Host } else { Self::Device }
    }
}
