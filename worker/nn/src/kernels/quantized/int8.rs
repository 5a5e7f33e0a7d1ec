//! Eight bits as LLM.int8 keeps weights (arXiv 2208.07339; `int8_vectorwise_quant` of bitsandbytes).
//!
//! ```text
//! w[o, i] = code[o, i] * absmax[o] / 127
//! ```

use rayon::prelude::*;

use super::pieces::{PIECE, absmax};
use crate::kernels::vectorised;

/// The largest code.
const MOST: f32 = 127.0;
/// What codes are multiplied with, beside their row's largest magnitude.
pub(in crate::kernels) const INVERSE: f32 = 1.0 / MOST;

/// The codes of a matrix, and of each row its largest magnitude.
#[derive(Debug)]
pub(super) struct Int8Codes {
    codes: Vec<i8>,
    absmax: Vec<f32>,
}

impl Int8Codes {
    /// See [`QuantizedMatrix::quantize`](super::QuantizedMatrix::quantize).
    pub fn quantize<E: Send>(
        [outputs, inputs]: [usize; 2],
        read: impl Fn(usize, &mut [f32]) -> Result<(), E> + Sync,
    ) -> Result<Self, E> {
        let mut codes = vec![0; outputs * inputs];
        let mut scales = vec![0.0; outputs];
        let rows = (PIECE / inputs.max(1)).max(1);
        let pieces =
            codes.par_chunks_mut((rows * inputs).max(1)).zip(scales.par_chunks_mut(rows)).enumerate();
        let buffer = || vec![0.0; rows.min(outputs) * inputs];
        pieces.try_for_each_init(buffer, |buffer, (piece, (codes, scales))| {
            let values = &mut buffer[..codes.len()];
            read(piece * rows * inputs, values)?;
            let each = values.chunks_exact(inputs).zip(codes.chunks_exact_mut(inputs)).zip(scales);
            each.for_each(|((values, codes), scale)| *scale = pack(values, codes));
            Ok(())
        })?;
        Ok(Self { codes, absmax: scales })
    }

    /// See [`QuantizedMatrix::is_finite`](super::QuantizedMatrix::is_finite).
    pub fn is_finite(&self) -> bool {
        self.absmax.iter().all(|absmax| absmax.is_finite())
    }

    /// See [`QuantizedMatrix::dequantize`](super::QuantizedMatrix::dequantize).
    pub fn dequantize(&self, first: usize, to: &mut [f32]) {
        let inputs = self.codes.len() / self.absmax.len().max(1);
        let (mut at, mut rest) = (first, to);
        while !rest.is_empty() {
            let (row, after) = rest.split_at_mut((inputs - at % inputs).min(rest.len()));
            let (absmax, codes) = (self.absmax[at / inputs], &self.codes[at..at + row.len()]);
            vectorised(
                #[inline(always)]
                || {
                    for (value, code) in row.iter_mut().zip(codes) {
                        *value = f32::from(*code) * absmax * INVERSE;
                    }
                },
            );
            (at, rest) = (at + codes.len(), after);
        }
    }

    /// Bytes of a matrix of this shape.
    pub fn bytes([outputs, inputs]: [usize; 2]) -> u64 {
        (outputs * inputs + 4 * outputs) as u64
    }

    /// The codes that have these [`parts`](Self::parts).
    pub fn of_parts(codes: Vec<i8>, absmax: Vec<f32>) -> Self {
        Self { codes, absmax }
    }

    /// Codes, and the largest magnitudes of rows.
    pub fn parts(&self) -> (&[i8], &[f32]) {
        (&self.codes, &self.absmax)
    }
}

/// Writes a row's codes; returns its largest magnitude.
fn pack(values: &[f32], codes: &mut [i8]) -> f32 {
    vectorised(
        #[inline(always)]
        || {
            let absmax = absmax(values);
            // In this order, as torch divides a number by a tensor: ties of bfloat16 weights hang on the
            // last bit.
            let to_codes = if absmax > 0.0 { (1.0 / absmax) * MOST } else { 0.0 };
            for (code, value) in codes.iter_mut().zip(values) {
                *code = (value * to_codes).round_ties_even() as i8;
            }
            absmax
        },
    )
}
