//! Frozen weights in 4 and 8 bits, in the layouts of bitsandbytes.
//!
//! ```text
//! nf4       two codes a byte, a scale for 64 weights, kept in 8 bits itself (`dynamic`)
//! int8      a code a byte, a scale for a row
//! ```
//!
//! A matrix is quantized while it is read, piece by piece: as numbers it is never whole in memory. The bits
//! depend on its values alone, not on threads. Products of a CPU widen a panel of it at a time
//! (`flex::linear`); on a GPU it lies in words (`words`), and is widened as a whole for each product
//! (`cube::quantized`).
//!
//! What this module does not do: outliers of activations in a precision of their own (LLM.int8's other half),
//! and products of integers.

mod dynamic;
mod int8;
mod nf4;
mod pieces;
mod words;

use burn::tensor::{Bytes, DType, Tensor, TensorData, backend::Backend};

#[cfg(feature = "cuda")]
pub(super) use self::{
    int8::INVERSE,
    nf4::{BLOCK, GROUP},
    words::{Nf4Places, int8_magnitudes},
};
use self::{int8::Int8Codes, nf4::Nf4Codes};
use crate::dtypes::Packing;

/// A matrix `[o, i]` of few bits.
#[derive(Debug)]
pub struct QuantizedMatrix {
    shape: [usize; 2],
    codes: Codes,
}

#[derive(Debug)]
enum Codes {
    Nf4(Nf4Codes),
    Int8(Int8Codes),
    /// Sizes are all there is.
    Hollow(Packing),
}

impl QuantizedMatrix {
    /// Quantizes a matrix. `read` puts as many of its values, row-major from the given one on, as there is
    /// room for; any thread calls it.
    pub fn quantize<E: Send>(
        packing: Packing,
        shape: [usize; 2],
        read: impl Fn(usize, &mut [f32]) -> Result<(), E> + Sync,
    ) -> Result<Self, E> {
        let codes = match packing {
            Packing::Nf4 => Codes::Nf4(Nf4Codes::quantize(shape[0] * shape[1], read)?),
            Packing::Int8 => Codes::Int8(Int8Codes::quantize(shape, read)?),
        };
        Ok(Self { shape, codes })
    }

    /// One without values, where sizes are all there is.
    pub fn hollow(packing: Packing, shape: [usize; 2]) -> Self {
        Self { shape, codes: Codes::Hollow(packing) }
    }

    /// How it is packed.
    pub(super) fn packing(&self) -> Packing {
        match self.codes {
            Codes::Nf4(_) => Packing::Nf4,
            Codes::Int8(_) => Packing::Int8,
            Codes::Hollow(packing) => packing,
        }
    }

    /// Outputs and inputs.
    pub fn shape(&self) -> [usize; 2] {
        self.shape
    }

    /// Whether all that was quantized was finite.
    pub fn is_finite(&self) -> bool {
        match &self.codes {
            Codes::Nf4(codes) => codes.is_finite(),
            Codes::Int8(codes) => codes.is_finite(),
            Codes::Hollow(_) => true,
        }
    }

    /// Values, row-major from `first` on, as many as there is room for.
    pub fn dequantize(&self, first: usize, to: &mut [f32]) {
        match &self.codes {
            Codes::Nf4(codes) => codes.dequantize(first, to),
            Codes::Int8(codes) => codes.dequantize(first, to),
            Codes::Hollow(_) => {}
        }
    }

    /// All of it in float32.
    pub fn tensor<B: Backend>(&self, device: &B::Device) -> Tensor<B, 2> {
        if matches!(self.codes, Codes::Hollow(_)) {
            return Tensor::zeros(self.shape, (device, DType::F32));
        }
        let mut values = vec![0.0f32; self.shape[0] * self.shape[1]];
        self.dequantize(0, &mut values);
        Tensor::from_data(TensorData::new(values, self.shape), (device, DType::F32))
    }

    /// Words, as a device has them.
    pub(super) fn words(&self) -> TensorData {
        let shape = [words::count(self.packing(), self.shape)];
        let words = match &self.codes {
            Codes::Nf4(codes) => words::of_nf4(codes),
            Codes::Int8(codes) => words::of_int8(codes),
            Codes::Hollow(_) => {
                let bytes = Bytes::from_bytes_vec(Vec::new());
                return TensorData { bytes, shape: shape.into(), dtype: DType::I32 };
            }
        };
        TensorData::new(bytemuck::cast_vec::<u32, i32>(words), shape)
    }

    /// A matrix out of its words.
    pub(super) fn of_words(packing: Packing, shape: [usize; 2], words: &[u32]) -> Self {
        let codes = match packing {
            Packing::Nf4 => Codes::Nf4(words::nf4(words, shape[0] * shape[1])),
            Packing::Int8 => Codes::Int8(words::int8(words, shape)),
        };
        Self { shape, codes }
    }

    /// Bytes that a matrix of `shape` takes on a device.
    pub fn device_bytes(packing: Packing, shape: [usize; 2]) -> u64 {
        4 * words::count(packing, shape) as u64
    }

    /// Bytes that a matrix of `shape` takes in host memory.
    pub fn bytes(packing: Packing, shape: [usize; 2]) -> u64 {
        match packing {
            Packing::Nf4 => Nf4Codes::bytes(shape[0] * shape[1]),
            Packing::Int8 => Int8Codes::bytes(shape),
        }
    }
}

#[cfg(test)]
mod tests;
