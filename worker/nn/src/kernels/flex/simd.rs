//! Vector code from plain Rust loops: run-time choice of the instruction set, a fast `exp`, and reductions in
//! fixed order.
//!
//! A loop written over slices and compiled inside [`vectorised`] is vectorised by the compiler for AVX-512,
//! AVX2, or whatever the target always has (SSE2, NEON). There are no fused multiply-adds in the source and
//! every reduction runs over [`LANES`] partial sums that are added in one order, so results are the same bits
//! on every instruction set.
//!
//! What it does not do: threads ([`rows`](super::rows)), and matrix products ([`matrix`](super::matrix)).

/// Partial sums of a reduction: two AVX-512 registers, enough to hide the latency of an addition.
pub const LANES: usize = 32;

/// Runs `op` compiled for the best instruction set of this processor.
///
/// Only what is inlined into `op` gains from it: pass an `#[inline(always)]` closure and call
/// `#[inline(always)]` functions.
#[inline]
pub fn vectorised<R>(op: impl FnOnce() -> R) -> R {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
        {
            // SAFETY: the processor has every feature that the function enables.
            return unsafe { with_avx512(op) };
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: as above.
            return unsafe { with_avx2(op) };
        }
    }
    op()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn with_avx512<R>(op: impl FnOnce() -> R) -> R {
    op()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn with_avx2<R>(op: impl FnOnce() -> R) -> R {
    op()
}

/// `e^x` within 2 units in the last place on `[-87.3, 88.3]`, clamped to that range outside it; NaN stays
/// NaN.
///
/// Cephes' `expf`: `x = n ln 2 + r`, `|r| <= ln 2 / 2`, a polynomial in `r`, and `2^n` put together from its
/// bits.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    // Adding 1.5 * 2^23 leaves the nearest integer in the low bits of the mantissa.
    const ROUND: f32 = 12_582_912.0;
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let x = x.clamp(-87.336_54, 88.376_26);
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = x - n * LN2_HIGH - n * LN2_LOW;
    let p = 1.987_569_1e-4;
    let p = p * r + 1.398_2e-3;
    let p = p * r + 8.333_452e-3;
    let p = p * r + 4.166_579_6e-2;
    let p = p * r + 1.666_666_5e-1;
    let p = p * r + 0.5;
    let fraction = p * (r * r) + r + 1.0;
    let exponent = shifted.to_bits().wrapping_sub(ROUND.to_bits()).wrapping_add(127) << 23;
    fraction * f32::from_bits(exponent)
}

/// `1 / (1 + e^-x)`.
#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// `sum f(a)`.
#[inline(always)]
pub fn sum(a: &[f32], f: impl Fn(f32) -> f32) -> f32 {
    let mut lanes = [0.0; LANES];
    let (blocks, rest) = a.as_chunks::<LANES>();
    for block in blocks {
        for j in 0..LANES {
            lanes[j] += f(block[j]);
        }
    }
    rest.iter().fold(fold(lanes, |x, y| x + y), |total, &x| total + f(x))
}

/// `sum f(a, b)` over slices of one length.
#[inline(always)]
pub fn sum2(a: &[f32], b: &[f32], f: impl Fn(f32, f32) -> f32) -> f32 {
    let mut lanes = [0.0; LANES];
    let (a_blocks, a_rest) = a.as_chunks::<LANES>();
    let (b_blocks, b_rest) = b.as_chunks::<LANES>();
    for (x, y) in a_blocks.iter().zip(b_blocks) {
        for j in 0..LANES {
            lanes[j] += f(x[j], y[j]);
        }
    }
    let rest = a_rest.iter().zip(b_rest);
    rest.fold(fold(lanes, |x, y| x + y), |total, (&x, &y)| total + f(x, y))
}

/// The largest value; `-inf` for an empty slice. NaN is passed over.
#[inline(always)]
pub fn max(a: &[f32]) -> f32 {
    let larger = |x: f32, y: f32| if y > x { y } else { x };
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let (blocks, rest) = a.as_chunks::<LANES>();
    for block in blocks {
        for j in 0..LANES {
            lanes[j] = larger(lanes[j], block[j]);
        }
    }
    rest.iter().fold(fold(lanes, larger), |top, &x| larger(top, x))
}

#[inline(always)]
fn fold(mut lanes: [f32; LANES], f: impl Fn(f32, f32) -> f32) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for j in 0..width {
            lanes[j] = f(lanes[j], lanes[j + width]);
        }
        width /= 2;
    }
    lanes[0]
}

/// Writes the transpose of a `[rows, cols]` matrix, whose rows are `stride` apart, to `to`: `[cols, rows]`,
/// rows `to_stride` apart.
pub fn transpose(from: &[f32], [rows, cols]: [usize; 2], stride: usize, to: &mut [f32], to_stride: usize) {
    let reaches = |rows: usize, cols: usize, stride: usize| (rows - 1) * stride + cols;
    if rows == 0 || cols == 0 {
        return;
    }
    assert!(reaches(rows, cols, stride) <= from.len(), "a matrix reaches past its data");
    assert!(rows <= to_stride && reaches(cols, rows, to_stride) <= to.len(), "a transpose does not fit");
    let tiled = [rows - rows % TILE, cols - cols % TILE];
    for r in (0..tiled[0]).step_by(TILE) {
        for c in (0..tiled[1]).step_by(TILE) {
            transpose_tile(&from[r * stride + c..], stride, &mut to[c * to_stride + r..], to_stride);
        }
    }
    for r in 0..rows {
        let first = if r < tiled[0] { tiled[1] } else { 0 };
        for c in first..cols {
            to[c * to_stride + r] = from[r * stride + c];
        }
    }
}

/// Side of the squares that [`transpose`] moves: an AVX-512 register.
const TILE: usize = 16;

fn transpose_tile(from: &[f32], from_stride: usize, to: &mut [f32], to_stride: usize) {
    assert!(
        from.len() >= 15 * from_stride + TILE && to.len() >= 15 * to_stride + TILE,
        "a tile reaches past its data"
    );
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx512f") {
        // SAFETY: the processor has the feature, and the tile lies within both slices.
        return unsafe { transpose_tile_avx512(from.as_ptr(), from_stride, to.as_mut_ptr(), to_stride) };
    }
    for r in 0..TILE {
        for c in 0..TILE {
            to[c * to_stride + r] = from[r * from_stride + c];
        }
    }
}

/// Four rounds of shuffles: within pairs of rows, within quadruples, then two rounds that exchange quarters
/// of registers. Every cache line is touched once, so that rows whose distance is a power of two do not evict
/// each other.
///
/// # Safety
///
/// Rows `from + i * from_stride` and `to + i * to_stride`, `i < 16`, must be 16 elements that may be read and
/// written.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn transpose_tile_avx512(from: *const f32, from_stride: usize, to: *mut f32, to_stride: usize) {
    use std::arch::x86_64::*;

    // SAFETY: the caller's promise.
    let rows: [__m512; TILE] = std::array::from_fn(|i| unsafe { _mm512_loadu_ps(from.add(i * from_stride)) });
    let mut a = rows;
    let mut b = rows;
    for i in (0..TILE).step_by(2) {
        a[i] = _mm512_unpacklo_ps(b[i], b[i + 1]);
        a[i + 1] = _mm512_unpackhi_ps(b[i], b[i + 1]);
    }
    let low = |x, y| _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(x), _mm512_castps_pd(y)));
    let high = |x, y| _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(x), _mm512_castps_pd(y)));
    for i in (0..TILE).step_by(4) {
        b[i] = low(a[i], a[i + 2]);
        b[i + 1] = high(a[i], a[i + 2]);
        b[i + 2] = low(a[i + 1], a[i + 3]);
        b[i + 3] = high(a[i + 1], a[i + 3]);
    }
    for i in 0..4 {
        a[i] = _mm512_shuffle_f32x4::<0x88>(b[i], b[i + 4]);
        a[i + 4] = _mm512_shuffle_f32x4::<0xdd>(b[i], b[i + 4]);
        a[i + 8] = _mm512_shuffle_f32x4::<0x88>(b[i + 8], b[i + 12]);
        a[i + 12] = _mm512_shuffle_f32x4::<0xdd>(b[i + 8], b[i + 12]);
    }
    for i in 0..8 {
        b[i] = _mm512_shuffle_f32x4::<0x88>(a[i], a[i + 8]);
        b[i + 8] = _mm512_shuffle_f32x4::<0xdd>(a[i], a[i + 8]);
    }
    for (i, column) in b.into_iter().enumerate() {
        // SAFETY: the caller's promise.
        unsafe { _mm512_storeu_ps(to.add(i * to_stride), column) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_two_units_in_the_last_place() {
        let mut worst = 0.0f64;
        for i in -87_000..88_000 {
            let x = i as f32 * 1e-3 + 1.7e-5;
            let exact = f64::from(x).exp();
            worst = worst.max((f64::from(exp(x)) - exact).abs() / exact);
        }
        assert!(worst < 2.0 * f64::from(f32::EPSILON), "relative error {worst:e}");
    }

    #[test]
    fn exp_saturates_and_keeps_nan() {
        assert!(exp(-1e30) < 1.2e-38 && exp(f32::NEG_INFINITY) < 1.2e-38);
        assert!(exp(1e30) > 2e38 && exp(1e30).is_finite());
        assert!(exp(f32::NAN).is_nan());
        assert_eq!(exp(0.0), 1.0);
    }

    #[test]
    fn a_transpose_moves_every_element() {
        for (rows, cols, stride) in
            [(16, 16, 16), (33, 50, 64), (1, 40, 40), (40, 1, 1), (0, 3, 3), (128, 48, 50)]
        {
            let from: Vec<f32> = (0..rows * stride).map(|x| x as f32).collect();
            for padding in [0, 3] {
                let to_stride = rows + padding;
                let mut to = vec![-1.0; to_stride * cols];
                transpose(&from, [rows, cols], stride, &mut to, to_stride);
                for (i, &x) in to.iter().enumerate() {
                    let (c, r) = (i / to_stride, i % to_stride);
                    assert_eq!(x, if r < rows { (r * stride + c) as f32 } else { -1.0 });
                }
            }
        }
    }

    #[test]
    fn reductions_agree_with_and_without_vector_instructions() {
        let a: Vec<f32> = (0..1003).map(|i| ((i * 7919) % 1000) as f32 / 311.0 - 1.5).collect();
        let b: Vec<f32> = a.iter().rev().copied().collect();
        let plain = (sum(&a, |x| x * x), sum2(&a, &b, |x, y| x * y), max(&a));
        let fast = vectorised(
            #[inline(always)]
            || (sum(&a, |x| x * x), sum2(&a, &b, |x, y| x * y), max(&a)),
        );
        assert_eq!(plain, fast);
        let exact: f64 = a.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
        assert!((f64::from(fast.0) - exact).abs() < 1e-6 * exact);
    }
}
