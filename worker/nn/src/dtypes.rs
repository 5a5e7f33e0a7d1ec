//! In what precision a model keeps its weights and hands values from block to block.

use serde::{Deserialize, Serialize};

/// How frozen weights are kept in memory: `model.weights_dtype`. Trainables always have fp32 master weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FrozenDtype {
    /// 4 bytes a weight.
    #[default]
    Float32,
    /// 2 bytes a weight; products still accumulate in fp32.
    Bfloat16,
    /// 2 bytes a weight where a GPU multiplies no bfloat16 (V100, T4): more exact, and of a smaller range, so
    /// that the loss is scaled. Not on a CPU, which would gain nothing over bfloat16.
    Float16,
    /// Linear layers of the language model in 4 bits and a bit of scales (QLoRA, arXiv 2305.14314),
    /// everything else in bfloat16.
    Nf4,
    /// Linear layers of the language model in 8 bits (LLM.int8's layout of weights, arXiv 2208.07339),
    /// everything else in bfloat16.
    Int8,
}

impl FrozenDtype {
    /// Each of them, in the order of their numbers.
    pub const ALL: [Self; 5] = [Self::Float32, Self::Bfloat16, Self::Float16, Self::Nf4, Self::Int8];

    /// As run files spell it.
    pub fn name(self) -> &'static str {
        self.packing().map_or(self.dense().name(), Packing::name)
    }

    /// The type of every matrix that is not packed.
    pub fn dense(self) -> WeightsDtype {
        match self {
            Self::Float32 => WeightsDtype::Float32,
            Self::Bfloat16 | Self::Nf4 | Self::Int8 => WeightsDtype::Bfloat16,
            Self::Float16 => WeightsDtype::Float16,
        }
    }

    /// How linear layers of a language model are packed, if they are.
    pub fn packing(self) -> Option<Packing> {
        match self {
            Self::Nf4 => Some(Packing::Nf4),
            Self::Int8 => Some(Packing::Int8),
            Self::Float32 | Self::Bfloat16 | Self::Float16 => None,
        }
    }
}

impl From<WeightsDtype> for FrozenDtype {
    fn from(dtype: WeightsDtype) -> Self {
        match dtype {
            WeightsDtype::Float32 => Self::Float32,
            WeightsDtype::Bfloat16 => Self::Bfloat16,
            WeightsDtype::Float16 => Self::Float16,
        }
    }
}

/// Fewer bits for a weight than any type of a tensor has ([`kernels::quantized`](crate::kernels::quantized)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Packing {
    /// Sixteen values, by blocks of 64 weights.
    Nf4,
    /// 255 values, by rows.
    Int8,
}

impl Packing {
    /// As run files spell it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Nf4 => "nf4",
            Self::Int8 => "int8",
        }
    }
}

/// The type of a frozen tensor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WeightsDtype {
    /// 4 bytes a weight.
    #[default]
    Float32,
    /// 2 bytes a weight; products still accumulate in fp32.
    Bfloat16,
    /// 2 bytes a weight where a GPU multiplies no bfloat16 (V100, T4): more exact, and of a smaller range, so
    /// that the loss is scaled. Not on a CPU, which would gain nothing over bfloat16.
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
