//! What memory is held for.
//!
//! One list for predictions, measurements and messages, so that the three can be laid side by side.

use std::fmt;

use serde::{Deserialize, Serialize};

/// What a piece of a worker's memory is held for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Category {
    /// Weights of the vision-language model: never trained.
    FrozenWeights,
    /// The flat space of everything that trains, in fp32; a rank's part of it is its master copy.
    Trainables,
    /// The flat gradients, full length on every rank until they are reduced.
    Gradients,
    /// AdamW's two moments, this rank's part.
    OptimizerShard,
    /// A copy of the neighbour's part of weights and moments, so that losing a rank costs no rollback.
    Mirror,
    /// What forward and backward of one micro-batch hold at their worst moment.
    Activations,
    /// What the communicator holds for itself.
    CollectiveBuffers,
    /// Micro-batches read ahead, and rows of the data set kept decoded.
    Input,
    /// What is held whatever is trained: runtime, tokenizer, scratch of the compute threads.
    Framework,
}

impl Category {
    /// All of them, in the order in which tables show them.
    pub const ALL: [Self; 9] = [
        Self::FrozenWeights,
        Self::Trainables,
        Self::Gradients,
        Self::OptimizerShard,
        Self::Mirror,
        Self::Activations,
        Self::CollectiveBuffers,
        Self::Input,
        Self::Framework,
    ];
}

impl fmt::Display for Category {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::FrozenWeights => "frozen weights",
            Self::Trainables => "trainables",
            Self::Gradients => "gradients",
            Self::OptimizerShard => "optimizer shard",
            Self::Mirror => "mirror of the neighbour",
            Self::Activations => "activations",
            Self::CollectiveBuffers => "collective buffers",
            Self::Input => "input",
            Self::Framework => "framework",
        })
    }
}
