//! The weight of a linear layer: a tensor, or a matrix of few bits.

use std::sync::Arc;

use burn::tensor::{DType, Tensor, TensorData, backend::Backend};
use half::bf16;

use super::{packed::PackedMatrix, quantized::QuantizedMatrix};

/// What a backend does to a weight before it multiplies.
pub trait WeightOps: Backend {
    /// Matrices of few bits, one below the other, in bfloat16: for one product, and given back with it.
    fn unpacked(parts: &[PackedMatrix<Self>]) -> Tensor<Self, 2> {
        let mut values = Vec::new();
        for part in parts {
            let mut wide = vec![0.0; part.shape().iter().product()];
            part.on_host().dequantize(0, &mut wide);
            values.extend(wide.into_iter().map(bf16::from_f32));
        }
        let device = parts.first().map(|part| part.words().device()).unwrap_or_default();
        Tensor::from_data(TensorData::new(values, packed_dims(parts)), (&device, DType::BF16))
    }
}

/// A linear layer's weight, `[o, i]`.
#[derive(Clone, Debug)]
pub enum Weight<B: Backend> {
    /// Values of some type; they may be on a tape.
    Dense(Tensor<B, 2>),
    /// Constants of few bits, in host memory and shared.
    Quantized(Arc<QuantizedMatrix>),
    /// Constants of few bits on a device: one matrix, or those of joined layers, one below the other.
    Packed(Vec<PackedMatrix<B>>),
}

impl<B: Backend> Weight<B> {
    /// Outputs and inputs.
    pub fn dims(&self) -> [usize; 2] {
        match self {
            Self::Dense(w_oi) => w_oi.dims(),
            Self::Quantized(matrix) => matrix.shape(),
            Self::Packed(parts) => packed_dims(parts),
        }
    }

    /// The type that products have it in; none where they read few bits.
    pub fn dtype(&self) -> Option<DType> {
        match self {
            Self::Dense(w_oi) => Some(w_oi.dtype()),
            Self::Quantized(_) => None,
            Self::Packed(_) => Some(DType::BF16),
        }
    }

    /// The weight of one of joined layers: the one of this number, which of a tensor `rows` gives. (What is
    /// in host memory is not joined.)
    pub fn layer(&self, number: usize, rows: impl FnOnce(&Tensor<B, 2>) -> Tensor<B, 2>) -> Self {
        match self {
            Self::Dense(w_oi) => Self::Dense(rows(w_oi)),
            Self::Quantized(matrix) => Self::Quantized(Arc::clone(matrix)),
            Self::Packed(parts) => Self::Packed(vec![parts[number].clone()]),
        }
    }
}

impl<B: WeightOps> Weight<B> {
    /// All of it as a tensor: the one that it is, or a new one: in bfloat16 of what is packed, and else in
    /// float32.
    pub fn into_tensor(self, device: &B::Device) -> Tensor<B, 2> {
        match self {
            Self::Dense(w_oi) => w_oi,
            Self::Quantized(matrix) => matrix.tensor(device),
            Self::Packed(parts) => B::unpacked(&parts),
        }
    }
}

/// Outputs of all of these, and inputs.
pub(super) fn packed_dims<B: Backend>(parts: &[PackedMatrix<B>]) -> [usize; 2] {
    let outputs = parts.iter().map(|part| part.shape()[0]).sum();
    [outputs, parts.first().map_or(0, |part| part.shape()[1])]
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

impl<B: Backend> From<PackedMatrix<B>> for Weight<B> {
    fn from(matrix: PackedMatrix<B>) -> Self {
        Self::Packed(vec![matrix])
    }
}
