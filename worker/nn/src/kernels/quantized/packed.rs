//! A matrix of few bits where kernels read it: 32-bit words on a device.
//!
//! ```text
//! nf4     codes, eight a word │ scales, four a word │ ranges │ mean │ the dynamic type │ what codes say
//! int8    codes, four a word │ the largest magnitude of each row
//! ```
//!
//! Bytes lie in words in their order, the first in the lowest bits; numbers are there by their bits. The two
//! tables that NF4 ends with are alike everywhere: a kibibyte a matrix, so that a kernel reads one buffer.

use burn::tensor::{Bytes, DType, Int, Tensor, TensorData, backend::Backend};

use super::{
    Codes, QuantizedMatrix, dynamic,
    int8::Int8Codes,
    nf4::{self, BLOCK, GROUP, Nf4Codes},
};
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
        Self { packing: matrix.packing(), shape: matrix.shape, words }
    }

    /// Outputs and inputs.
    pub fn shape(&self) -> [usize; 2] {
        self.shape
    }

    /// How it is packed.
    pub(in crate::kernels) fn packing(&self) -> Packing {
        self.packing
    }

    /// Its words.
    pub(in crate::kernels) fn words(&self) -> Tensor<B, 1, Int> {
        self.words.clone()
    }

    /// The same on another backend, whose tensors `change` makes.
    pub(in crate::kernels) fn changed<C: Backend>(
        self,
        change: impl FnOnce(Tensor<B, 1, Int>) -> Tensor<C, 1, Int>,
    ) -> PackedMatrix<C> {
        PackedMatrix { packing: self.packing, shape: self.shape, words: change(self.words) }
    }

    /// Back in host memory.
    pub(in crate::kernels) fn on_host(&self) -> QuantizedMatrix {
        let words: Vec<i32> = self.words().into_data().into_vec().expect("words are read as they were given");
        QuantizedMatrix::of_words(self.packing, self.shape, bytemuck::cast_slice(&words))
    }
}

/// Where the parts of an NF4 matrix begin, in words; its codes are the first.
pub(in crate::kernels) struct Nf4Places {
    pub scales: usize,
    pub ranges: usize,
    pub mean: usize,
    pub dynamic: usize,
    pub values: usize,
    end: usize,
}

impl Nf4Places {
    /// Of so many weights.
    pub fn of(len: usize) -> Self {
        let (scales, blocks) = (len.div_ceil(8), len.div_ceil(BLOCK));
        let ranges = scales + blocks.div_ceil(4);
        let mean = ranges + blocks.div_ceil(GROUP);
        let dynamic = mean + 1;
        let values = dynamic + dynamic::VALUES.len();
        Self { scales, ranges, mean, dynamic, values, end: values + nf4::VALUES.len() }
    }
}

/// Where the largest magnitudes of an int8 matrix begin, in words; its codes are the first.
pub(in crate::kernels) fn int8_magnitudes([outputs, inputs]: [usize; 2]) -> usize {
    (outputs * inputs).div_ceil(4)
}

/// Words of a matrix.
fn words(packing: Packing, shape: [usize; 2]) -> usize {
    match packing {
        Packing::Nf4 => Nf4Places::of(shape[0] * shape[1]).end,
        Packing::Int8 => int8_magnitudes(shape) + shape[0],
    }
}

impl QuantizedMatrix {
    /// Bytes that a matrix of `shape` takes on a device.
    pub fn device_bytes(packing: Packing, shape: [usize; 2]) -> u64 {
        4 * words(packing, shape) as u64
    }

    fn words(&self) -> TensorData {
        let shape = [words(self.packing(), self.shape)];
        let mut words: Vec<u32> = Vec::new();
        match &self.codes {
            Codes::Hollow(_) => {
                let bytes = Bytes::from_bytes_vec(Vec::new());
                return TensorData { bytes, shape: shape.into(), dtype: DType::I32 };
            }
            Codes::Nf4(codes) => {
                let (codes, scales, ranges, mean) = codes.parts();
                words.reserve_exact(shape[0]);
                [codes, scales].into_iter().for_each(|bytes| put_bytes(&mut words, bytes));
                for numbers in [ranges, &[mean], &dynamic::VALUES[..], &nf4::VALUES] {
                    words.extend(numbers.iter().map(|number| number.to_bits()));
                }
            }
            Codes::Int8(codes) => {
                let (codes, absmax) = codes.parts();
                words.reserve_exact(shape[0]);
                put_bytes(&mut words, bytemuck::cast_slice(codes));
                words.extend(absmax.iter().map(|number| number.to_bits()));
            }
        }
        TensorData::new(bytemuck::cast_vec::<u32, i32>(words), shape)
    }

    fn of_words(packing: Packing, shape: [usize; 2], words: &[u32]) -> Self {
        let len = shape[0] * shape[1];
        let numbers = |words: &[u32]| words.iter().map(|word| f32::from_bits(*word)).collect::<Vec<_>>();
        let codes = match packing {
            Packing::Nf4 => {
                let places = Nf4Places::of(len);
                let codes = bytes(&words[..places.scales], len.div_ceil(2));
                let scales = bytes(&words[places.scales..places.ranges], len.div_ceil(BLOCK));
                let ranges = numbers(&words[places.ranges..places.mean]);
                Codes::Nf4(Nf4Codes::of_parts(codes, scales, ranges, f32::from_bits(words[places.mean])))
            }
            Packing::Int8 => {
                let (codes, absmax) = words.split_at(int8_magnitudes(shape));
                let codes = bytemuck::cast_vec::<u8, i8>(bytes(codes, len));
                Codes::Int8(Int8Codes::of_parts(codes, numbers(absmax)))
            }
        };
        Self { shape, codes }
    }
}

/// What of the last word is left is zero.
fn put_bytes(words: &mut Vec<u32>, bytes: &[u8]) {
    let (whole, rest) = bytes.as_chunks::<4>();
    words.extend(whole.iter().map(|bytes| u32::from_le_bytes(*bytes)));
    if !rest.is_empty() {
        let mut last = [0; 4];
        last[..rest.len()].copy_from_slice(rest);
        words.push(u32::from_le_bytes(last));
    }
}

fn bytes(words: &[u32], len: usize) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).take(len).collect()
}
