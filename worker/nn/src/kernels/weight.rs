//! The weight of a linear layer: a tensor, or a matrix of few bits.

use std::sync::Arc;

use burn::tensor::{DType, Tensor, backend::Backend};

use super::quantized::QuantizedMatrix;

/// A linear layer's weight, `[o, i]`.
#[derive(Clone, Debug)]
pub enum Weight<B: Backend> {
    /// Values of some type; they may be on a tape.
    Dense(Tensor<B, 2>),
    /// Constants of few bits, in host memory and shared.
    Quantized(Arc<QuantizedMatrix>),
}

impl<B: Backend> Weight<B> {
    /// Outputs and inputs.
    pub fn dims(&self) -> [usize; 2] {
        match self {
            Self::Dense(w_oi) => w_oi.dims(),
            Self::Quantized(matrix) => matrix.shape(),
        }
    }

    /// The type of its tensor, if it is one.
    pub fn dtype(&self) -> Option<DType> {
        match self {
            Self::Dense(w_oi) => Some(w_oi.dtype()),
            Self::Quantized(_) => None,
        }
    }

    /// All of it as a tensor: the one that it is, or a new one in float32.
    pub fn into_tensor(self, device: &B::Device) -> Tensor<B, 2> {
        match self {
            Self::Dense(w_oi) => w_oi,
            Self::Quantized(matrix) => matrix.tensor(device),
        }
    }
}

impl<B: Backend> From<Tensor<B, 2>> for Weight<B> {
    fn from(w_oi: Tensor<B, 2>) -> Self {
        Self::Dense(w_oi)
    }
}

impl<B: Backend> From<QuantizedMatrix> for Weight<B> {
    fn from(matrix: QuantizedMatrix) -> Self {
        Self::Quantized(Arc::new(matrix))
    }
}
