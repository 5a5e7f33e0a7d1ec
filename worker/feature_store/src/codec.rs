//! Values as bytes: float32, bfloat16, or int8 with a scale for each token.
//!
//! ```text
//! float32   bytes of each value, little endian: exact
//! bfloat16  its upper 16 bits, rounded to nearest even: relative error up to 2^-8
//! int8      tokens x scale (float32), then tokens x width x q, where x = q * scale and q is in -127..=127;
//!           scale = largest magnitude of the token / 127, rounded up to 17 bits of mantissa: error up to
//!           scale / 2
//! ```
//!
//! Seventeen bits times seven make the product exact, so rounding what was rounded before changes nothing:
//! `round_trip(round_trip(x)) == round_trip(x)`, bit for bit. A token with a value that is not finite becomes
//! NaN as a whole in int8; the other two keep such values. The loops are written without branches, so that
//! the compiler vectorises them.

use coxswain_proto::run_spec::CacheDtype;
use half::bf16;

use coxswain_nn::bfloat16::{narrow, widen};

/// The smallest scale: tokens that small become zeros or few distinct values, and no division meets a zero or
/// a subnormal.
const SMALLEST_SCALE: f32 = f32::from_bits(27 << 23); // 2^-100
/// Adding it rounds a float of magnitude below 2^22 to the nearest integer, ties to even, and leaves that in
/// the lowest bits.
const ROUNDER: f32 = 12_582_912.0;
/// Sums kept side by side, so that they are added in vectors.
const LANES: usize = 8;

/// What a value becomes by being stored as `dtype` and read again; `values` are tokens of `width` each.
///
/// A miss must give the same bits as the hit after it, so what is computed goes through this before it is
/// used.
pub fn round_trip(dtype: CacheDtype, width: usize, values: &mut [f32]) {
    match dtype {
        CacheDtype::Float32 => {}
        CacheDtype::Bfloat16 => values.iter_mut().for_each(|x| *x = widen(narrow(*x))),
        CacheDtype::Int8 => {
            let mut quantised = vec![0; width];
            for token in values.chunks_exact_mut(width.max(1)) {
                let scale = quantise(token, &mut quantised);
                dequantise(&quantised, scale, token);
            }
        }
    }
}

/// The dtype's number in file headers and keys.
pub(super) fn code(dtype: CacheDtype) -> u32 {
    match dtype {
        CacheDtype::Float32 => 0,
        CacheDtype::Bfloat16 => 1,
        CacheDtype::Int8 => 2,
    }
}

/// Bytes of `tokens * width` values. What a file claims and no file can have is `usize::MAX`.
pub(super) fn encoded_len(dtype: CacheDtype, tokens: usize, width: usize) -> usize {
    let token = match dtype {
        CacheDtype::Float32 => width.saturating_mul(4),
        CacheDtype::Bfloat16 => width.saturating_mul(2),
        CacheDtype::Int8 => width.saturating_add(4),
    };
    tokens.saturating_mul(token)
}

/// Appends the bytes of `values`, tokens of `width` each, to `out`.
pub(super) fn encode(dtype: CacheDtype, width: usize, values: &[f32], out: &mut Vec<u8>) {
    let (width, from) = (width.max(1), out.len());
    out.resize(from + encoded_len(dtype, values.len() / width, width), 0);
    let out = &mut out[from..];
    match dtype {
        CacheDtype::Float32 => {
            for (bytes, x) in out.as_chunks_mut::<4>().0.iter_mut().zip(values) {
                *bytes = x.to_le_bytes();
            }
        }
        CacheDtype::Bfloat16 => {
            for (bytes, x) in out.as_chunks_mut::<2>().0.iter_mut().zip(values) {
                *bytes = narrow(*x).to_le_bytes();
            }
        }
        CacheDtype::Int8 => {
            let (scales, quantised) = out.split_at_mut(values.len() / width * 4);
            let quantised: &mut [i8] = bytemuck::cast_slice_mut(quantised);
            let tokens = values.chunks_exact(width).zip(quantised.chunks_exact_mut(width));
            for ((values, quantised), bytes) in tokens.zip(scales.as_chunks_mut::<4>().0) {
                *bytes = quantise(values, quantised).to_le_bytes();
            }
        }
    }
}

/// The values of `bytes`, which are as [`encode`] made them, and of the length that [`encoded_len`] gives.
pub(super) fn decode(dtype: CacheDtype, width: usize, bytes: &[u8], out: &mut [f32]) {
    match dtype {
        CacheDtype::Float32 => {
            for (x, bytes) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
                *x = f32::from_le_bytes(*bytes);
            }
        }
        CacheDtype::Bfloat16 => {
            for (x, bytes) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *x = widen(bf16::from_le_bytes(*bytes));
            }
        }
        CacheDtype::Int8 => {
            let width = width.max(1);
            let (scales, quantised) = bytes.split_at(out.len() / width * 4);
            let quantised: &[i8] = bytemuck::cast_slice(quantised);
            let tokens = out.chunks_exact_mut(width).zip(quantised.chunks_exact(width));
            for ((out, quantised), scale) in tokens.zip(scales.as_chunks::<4>().0) {
                dequantise(quantised, f32::from_le_bytes(*scale), out);
            }
        }
    }
}

/// Squared difference of `values` and what storing makes of them, and their squared norm.
pub(super) fn squared_error(dtype: CacheDtype, width: usize, values: &[f32], bytes: &[u8]) -> (f64, f64) {
    let width = width.max(1);
    // Token by token, so that what is decoded stays in the nearest cache.
    let mut stored = vec![0.0; width];
    let mut sums = (0.0, 0.0);
    let mut add = |token: &[f32], stored: &[f32]| {
        let (error, norm) = squares(token, stored);
        sums = (sums.0 + error, sums.1 + norm);
    };
    match dtype {
        CacheDtype::Float32 => {}
        CacheDtype::Bfloat16 => {
            for (token, bytes) in values.chunks_exact(width).zip(bytes.chunks_exact(2 * width)) {
                decode(dtype, width, bytes, &mut stored);
                add(token, &stored);
            }
        }
        CacheDtype::Int8 => {
            let (scales, quantised) = bytes.split_at(values.len() / width * 4);
            let quantised: &[i8] = bytemuck::cast_slice(quantised);
            let tokens = values.chunks_exact(width).zip(quantised.chunks_exact(width));
            for ((token, quantised), scale) in tokens.zip(scales.as_chunks::<4>().0) {
                dequantise(quantised, f32::from_le_bytes(*scale), &mut stored);
                add(token, &stored);
            }
        }
    }
    sums
}

/// Squared difference of a token and what is stored of it, and its squared norm. In float32 lanes within a
/// token, in float64 over lanes: exact enough for a figure of two digits.
fn squares(token: &[f32], stored: &[f32]) -> (f64, f64) {
    let add = |(mut error, mut norm): Sums, x: &[f32], y: &[f32]| {
        for ((error, norm), (x, y)) in error.iter_mut().zip(&mut norm).zip(x.iter().zip(y)) {
            *error += (x - y) * (x - y);
            *norm += x * x;
        }
        (error, norm)
    };
    let ((tokens, token_rest), (all, rest)) = (token.as_chunks::<LANES>(), stored.as_chunks::<LANES>());
    let sums = tokens.iter().zip(all).fold(Sums::default(), |sums, (x, y)| add(sums, x, y));
    let (error, norm) = add(sums, token_rest, rest);
    let sum = |lanes: [f32; LANES]| lanes.iter().map(|sum| f64::from(*sum)).sum();
    (sum(error), sum(norm))
}

/// Sums that are added side by side: of squared differences, and of squares.
type Sums = ([f32; LANES], [f32; LANES]);

/// Quantises one token; returns its scale, NaN if a value is not finite.
fn quantise(values: &[f32], out: &mut [i8]) -> f32 {
    // Magnitudes are ordered as their bits are, and integers have a maximum that is vectorised.
    let largest = values.iter().fold(0, |largest, x| largest.max(x.to_bits() & 0x7fff_ffff));
    let largest = f32::from_bits(largest);
    if !largest.is_finite() {
        out.fill(0);
        return f32::NAN;
    }
    let scale = scale_of(largest);
    for (q, x) in out.iter_mut().zip(values) {
        // The sum's lowest bits are the integer, in two's complement: no conversion that saturates, which is
        // not vectorised.
        *q = ((x / scale).clamp(-127.0, 127.0) + ROUNDER).to_bits() as i8;
    }
    scale
}

/// `largest / 127`, rounded up to 17 bits of mantissa unless 127 times that would overflow.
fn scale_of(largest: f32) -> f32 {
    let bits = (largest / 127.0).to_bits();
    let (up, down) = (f32::from_bits((bits + 0x7f) & !0x7f), f32::from_bits(bits & !0x7f));
    let scale = if (up * 127.0).is_finite() { up } else { down };
    scale.max(SMALLEST_SCALE)
}

fn dequantise(quantised: &[i8], scale: f32, out: &mut [f32]) {
    if scale.is_nan() {
        out.fill(f32::NAN);
        return;
    }
    for (x, q) in out.iter_mut().zip(quantised) {
        *x = f32::from(*q) * scale;
    }
}
