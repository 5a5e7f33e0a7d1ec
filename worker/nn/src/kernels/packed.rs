//! A matrix of few bits where kernels read it: the words of [`quantized`](super::quantized) on a device.

use burn::tensor::{DType, Int, Tensor, backend::Backend};

use super::quantized::QuantizedMatrix;
use crate::dtypes::Packing;

/// A matrix `[o, i]` of few bits on a device.
#[derive(Clone, Debug)]
pub struct PackedMatrix<B: Backend> {
    packing: Packing,
    shape: [usize; 2],
    words: Tensor<B, 1, Int>,
}

impl<B: Backend> PackedMatrix<B> {
    /// Brings a matrix to a device.
    pub fn on(matrix: &QuantizedMatrix, device: &B::Device) -> Self {
        let words = Tensor::from_data(matrix.words(), (device, DType::I32));
        Self { packing: matrix.packing(), shape: matrix.shape(), words }
    }

    /// Outputs and inputs.
    pub fn shape(&self) -> [usize; 2] {
        self.shape
    }

    /// How it is packed.
    #[cfg(feature = "cuda")]
    pub(super) fn packing(&self) -> Packing {
        self.packing
    }

    /// Words.
    pub(super) fn words(&self) -> Tensor<B, 1, Int> {
        self.words.clone()
    }

    /// This matrix on another backend, whose tensors `change` makes.
    pub(super) fn changed<C: Backend>(
        self,
        change: impl FnOnce(Tensor<B, 1, Int>) -> Tensor<C, 1, Int>,
    ) -> PackedMatrix<C> {
        PackedMatrix { packing: self.packing, shape: self.shape, words: change(self.words) }
    }

    /// Back in host memory.
    pub(super) fn on_host(&self) -> QuantizedMatrix {
        let words: Vec<i32> = self.words().into_data().into_vec().expect("words are read as they were given");
        QuantizedMatrix::of_words(self.packing, self.shape, bytemuck::cast_slice(&words))
    }
}
