//! NF4 (QLoRA, arXiv 2305.14314) as bitsandbytes lays it out: `quantize_4bit(quant_type="nf4",
//! compress_statistics=True)`.
//!
//! ```text
//! w[64 k + j] = VALUES[code[64 k + j]] * scale[k]
//! scale[k]    = dynamic[q[k]] * range[k / 256] + mean        8 bits a scale, 32 for 256 of them
//! codes       the first of two in the high half of a byte, row after row; blocks do not end with rows
//! ```

use rayon::prelude::*;

use super::{
    dynamic,
    pieces::{PIECE, absmax},
};
use crate::kernels::vectorised;

/// Weights that share a scale.
pub(in crate::kernels) const BLOCK: usize = 64;
/// Scales that share a range.
pub(in crate::kernels) const GROUP: usize = 256;
/// The least divisor, for a block of zeros.
const LEAST: f32 = 1e-38;

/// Quantiles of the normal distribution, scaled to [-1, 1] (the paper's appendix E), as bitsandbytes rounds
/// them.
pub(super) const VALUES: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];

/// What a byte says: the values of its high and its low half.
static PAIRS: [[f32; 2]; 256] = {
    let (mut pairs, mut byte) = ([[0.0; 2]; 256], 0);
    while byte < 256 {
        pairs[byte] = [VALUES[byte >> 4], VALUES[byte & 15]];
        byte += 1;
    }
    pairs
};

/// The codes of a matrix and their scales.
#[derive(Debug)]
pub(super) struct Nf4Codes {
    codes: Vec<u8>,
    scales: Vec<u8>,
    ranges: Vec<f32>,
    mean: f32,
}

impl Nf4Codes {
    /// See [`QuantizedMatrix::quantize`](super::QuantizedMatrix::quantize).
    pub fn quantize<E: Send>(
        len: usize,
        read: impl Fn(usize, &mut [f32]) -> Result<(), E> + Sync,
    ) -> Result<Self, E> {
        let mut codes = vec![0; len.div_ceil(2)];
        let mut scales = vec![0.0; len.div_ceil(BLOCK)];
        let pieces = codes.par_chunks_mut(PIECE / 2).zip(scales.par_chunks_mut(PIECE / BLOCK)).enumerate();
        let buffer = || vec![0.0; PIECE.min(len)];
        pieces.try_for_each_init(buffer, |buffer, (piece, (codes, scales))| {
            let first = piece * PIECE;
            let values = &mut buffer[..PIECE.min(len - first)];
            read(first, values)?;
            for ((values, codes), scale) in values.chunks(BLOCK).zip(codes.chunks_mut(BLOCK / 2)).zip(scales)
            {
                *scale = pack(values, codes);
            }
            Ok(())
        })?;
        Ok(Self::with_scales(codes, &scales))
    }

    /// Quantizes the scales, too.
    fn with_scales(codes: Vec<u8>, scales: &[f32]) -> Self {
        let sum: f64 = scales.iter().map(|scale| f64::from(*scale)).sum();
        let mean = (sum / scales.len().max(1) as f64) as f32;
        let (mut quantized, mut ranges) = (Vec::with_capacity(scales.len()), Vec::new());
        for group in scales.chunks(GROUP) {
            let range = group.iter().map(|scale| (scale - mean).abs()).fold(0.0, f32::max);
            let to_one = 1.0 / range.max(LEAST);
            quantized.extend(group.iter().map(|scale| dynamic::nearest((scale - mean) * to_one)));
            ranges.push(range);
        }
        ranges.shrink_to_fit();
        Self { codes, scales: quantized, ranges, mean }
    }

    /// See [`QuantizedMatrix::is_finite`](super::QuantizedMatrix::is_finite).
    pub fn is_finite(&self) -> bool {
        self.mean.is_finite()
    }

    /// See [`QuantizedMatrix::dequantize`](super::QuantizedMatrix::dequantize).
    pub fn dequantize(&self, first: usize, to: &mut [f32]) {
        let (mut at, mut rest) = (first, to);
        while !rest.is_empty() {
            let (block, after) = rest.split_at_mut((BLOCK - at % BLOCK).min(rest.len()));
            let (scale, next) = (self.scale(at / BLOCK), at + block.len());
            // A block may begin in the middle of a byte, and end there.
            let (head, whole) = block.split_at_mut(at % 2);
            head.iter_mut().for_each(|value| *value = PAIRS[usize::from(self.codes[at / 2])][1] * scale);
            let codes = &self.codes[at.div_ceil(2)..next.div_ceil(2)];
            let (whole, tail) = whole.as_chunks_mut::<2>();
            for (values, code) in whole.iter_mut().zip(codes) {
                *values = PAIRS[usize::from(*code)].map(|value| value * scale);
            }
            tail.iter_mut().for_each(|value| *value = PAIRS[usize::from(codes[whole.len()])][0] * scale);
            (at, rest) = (next, after);
        }
    }

    fn scale(&self, block: usize) -> f32 {
        dynamic::VALUES[usize::from(self.scales[block])] * self.ranges[block / GROUP] + self.mean
    }

    /// Bytes of so many weights.
    pub fn bytes(len: usize) -> u64 {
        let scales = len.div_ceil(BLOCK);
        (len.div_ceil(2) + scales + 4 * scales.div_ceil(GROUP) + size_of::<f32>()) as u64
    }

    /// The codes that have these [`parts`](Self::parts).
    pub fn of_parts(codes: Vec<u8>, scales: Vec<u8>, ranges: Vec<f32>, mean: f32) -> Self {
        Self { codes, scales, ranges, mean }
    }

    /// Codes, quantized scales, ranges and mean.
    pub fn parts(&self) -> (&[u8], &[u8], &[f32], f32) {
        (&self.codes, &self.scales, &self.ranges, self.mean)
    }
}

/// Writes a block's codes; returns its scale.
fn pack(values: &[f32], codes: &mut [u8]) -> f32 {
    vectorised(
        #[inline(always)]
        || {
            let scale = absmax(values);
            let mut numbers = [0u8; BLOCK];
            let mut scaled = [0.0f32; BLOCK];
            let whole = values.len() == BLOCK;
            for (scaled, value) in scaled.iter_mut().zip(values) {
                // As bitsandbytes: a last block that is not whole is divided.
                let value = if whole { value * (1.0 / scale.max(LEAST)) } else { value / scale.max(LEAST) };
                *scaled = value.clamp(-1.0, 1.0);
            }
            // A code is how many of the borders between values are below.
            for pair in VALUES.windows(2) {
                let border = (pair[0] + pair[1]) / 2.0;
                for (number, scaled) in numbers.iter_mut().zip(&scaled) {
                    *number += u8::from(*scaled > border);
                }
            }
            // What is behind the last value is there as zero.
            for (code, pair) in codes.iter_mut().zip(numbers.as_chunks::<2>().0) {
                *code = pair[0] << 4 | pair[1];
            }
            scale
        },
    )
}
