//! In what precision a model keeps its weights and hands values from block to block.

use serde::{Deserialize, Serialize};

/// How frozen weights are kept in memory. Trainables always have fp32 master weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WeightsDtype {
    /// 4 bytes a weight.
    #[default]
    Float32,
    /// 2 bytes a weight; products still accumulate in fp32.
    Bfloat16,
    /// The same where a GPU multiplies no bfloat16 (V100, T4): more exact, and of a smaller range, so that
    /// the loss is scaled. Not on a CPU, which would gain nothing over bfloat16.
    Float16,
}

impl WeightsDtype {
    /// Each of them, in the order of their numbers.
    pub const ALL: [Self; 3] = [Self::Float32, Self::Bfloat16, Self::Float16];

    /// As run files spell it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Float32 => "float32",
            Self::Bfloat16 => "bfloat16",
            Self::Float16 => "float16",
        }
    }

    /// Bytes of a weight.
    pub fn bytes(self) -> u64 {
        match self {
            Self::Float32 => 4,
            Self::Bfloat16 | Self::Float16 => 2,
        }
    }
}

/// How precise the values are that blocks hand to each other, and that layer recompute keeps for the backward
/// pass.
///
/// It is part of what is computed, in training as in evaluation and whatever `train.recompute` is, so that no
/// recompute mode changes a gradient. Products, attention, norms and all gradients are fp32 with either.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ActivationsDtype {
    /// As they are computed; kept in 4 bytes.
    #[default]
    Float32,
    /// Rounded to bfloat16; what recompute keeps takes 2 bytes. Nothing is multiplied in it, so any GPU will
    /// do.
    Bfloat16,
}
