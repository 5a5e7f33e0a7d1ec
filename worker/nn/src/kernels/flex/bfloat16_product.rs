//! Products of bfloat16 with sums in float32, by the instruction that processors have for them: `VDPBF16PS`
//! of AVX512-BF16 (Intel's Xeons from Sapphire Rapids on, AMD from Zen 4 on) adds two products to each of
//! sixteen sums.
//!
//! Both factors lie in pairs of values along the inner dimension. One panel of the right factor stays in a
//! core's cache while all rows of the left one pass by:
//!
//! ```text
//! left    [n, k / 2]       rows as they lie, rounded
//! panel   [k / 2, WIDTH]   a pair of each column beside each other, [`DEPTH`] of them at once
//! ```
//!
//! Every element is one sum in the order of the inner dimension, whatever is computed beside it: it depends
//! on its row and its column alone, bit for bit. The instruction takes subnormal numbers for zero.

use std::ops::Range;

use half::bf16;

use super::{
    matrix::{MatMut, UnwrittenMat},
    rounding, scratch, simd,
};

/// Columns of a panel: four registers.
pub const WIDTH: usize = 64;

/// Pairs of the inner dimension in a panel: with the copy that it is made of, 256 KiB.
const DEPTH: usize = 512;

/// Rows of a tile: its sums take 24 of 32 registers.
const ROWS: usize = 6;

/// Values of scratch that a product of this inner dimension takes on a thread.
pub fn scratch(depth: usize) -> usize {
    2 * WIDTH * DEPTH.min(depth / 2)
}

/// Whether this processor has the instruction.
pub fn is_available() -> bool {
    #[cfg(target_arch = "x86_64")]
    return is_x86_feature_detected!("avx512bw") && is_x86_feature_detected!("avx512bf16");
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// The left factor, `[n, k]`: rounded, which only a processor with the instruction has a use for.
pub struct LeftFactor {
    values: Vec<bf16>,
    shape: [usize; 2],
}

/// The right factor, of which a product reads some columns.
#[derive(Clone, Copy)]
pub enum RightFactor<'a> {
    /// `[columns, k]`: the product is with its transpose.
    Transposed(&'a [bf16]),
    /// `[k, columns]`, so many columns.
    Plain(&'a [bf16], usize),
}

impl LeftFactor {
    /// Rounds a matrix with an even number of columns.
    pub fn rounded(data: &[f32], shape: [usize; 2]) -> Self {
        assert!(is_available() && shape[1].is_multiple_of(2), "no bfloat16 product of {shape:?}");
        Self { values: rounding::narrowed(data), shape }
    }

    /// The product with at most [`WIDTH`] columns of `right`.
    pub fn product<'a>(
        &self,
        right: RightFactor<'_>,
        columns: Range<usize>,
        out: UnwrittenMat<'a>,
    ) -> MatMut<'a> {
        let ([rows, depth], mut out) = (self.shape, out.filled(0.0));
        assert!(out.shape() == [rows, columns.len()] && columns.len() <= WIDTH, "a panel of another shape");
        scratch::with(scratch(depth), |scratch| {
            let (panel, copy) = scratch.split_at_mut(scratch.len() / 2);
            for start in (0..depth / 2).step_by(DEPTH) {
                let pairs = start..(start + DEPTH).min(depth / 2);
                right.pack(columns.clone(), pairs.clone(), depth, panel, copy);
                let tiles = rows - rows % ROWS;
                (0..tiles)
                    .step_by(ROWS)
                    .for_each(|row| self.tile::<ROWS>(row, pairs.clone(), panel, &mut out));
                (tiles..rows).for_each(|row| self.tile::<1>(row, pairs.clone(), panel, &mut out));
            }
        });
        out
    }

    /// Adds the products of some pairs to `T` rows from `row` on.
    fn tile<const T: usize>(&self, row: usize, pairs: Range<usize>, panel: &[f32], out: &mut MatMut<'_>) {
        let (depth, width, mut sums) = (self.shape[1], out.shape()[1], [[0.0; WIDTH]; T]);
        let left: [&[bf16]; T] =
            std::array::from_fn(|t| &self.values[(row + t) * depth..][2 * pairs.start..2 * pairs.end]);
        for (t, sums) in sums.iter_mut().enumerate() {
            sums[..width].copy_from_slice(out.row(row + t));
        }
        // SAFETY: no left factor is made where the processor does not have the instruction.
        unsafe { add_products(left, &panel[..WIDTH * pairs.len()], &mut sums) };
        for (t, sums) in sums.iter().enumerate() {
            out.row(row + t).copy_from_slice(&sums[..width]);
        }
    }
}

impl RightFactor<'_> {
    /// Writes some pairs of some columns to `panel`, whose other columns mean nothing. `copy` is as large.
    fn pack(
        &self,
        columns: Range<usize>,
        pairs: Range<usize>,
        depth: usize,
        panel: &mut [f32],
        copy: &mut [f32],
    ) {
        let inner = 2 * pairs.start..2 * pairs.end;
        match *self {
            Self::Transposed(values) => {
                // A pair is as wide as a float32, and moved like one.
                let halves: &mut [bf16] = bytemuck::cast_slice_mut(copy);
                for (to, column) in halves.chunks_exact_mut(inner.len()).zip(columns.clone()) {
                    to.copy_from_slice(&values[column * depth..][inner.clone()]);
                }
                simd::transpose(copy, [columns.len(), pairs.len()], pairs.len(), panel, WIDTH);
            }
            Self::Plain(values, width) => {
                let halves: &mut [bf16] = bytemuck::cast_slice_mut(panel);
                for (to, first) in halves.chunks_exact_mut(2 * WIDTH).zip(inner.step_by(2)) {
                    let [even, odd] = [first, first + 1].map(|row| &values[row * width..][columns.clone()]);
                    simd::vectorised(
                        #[inline(always)]
                        || {
                            for ((to, even), odd) in to.as_chunks_mut::<2>().0.iter_mut().zip(even).zip(odd) {
                                *to = [*even, *odd];
                            }
                        },
                    );
                }
            }
        }
    }
}

/// `sums[t][column] += left[t] panel[..][column]`, pair after pair.
///
/// # Safety
///
/// The processor must have AVX512-BF16.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512bw,avx512bf16")]
unsafe fn add_products<const T: usize>(left: [&[bf16]; T], panel: &[f32], sums: &mut [[f32; WIDTH]; T]) {
    use std::arch::x86_64::*;

    const REGISTERS: usize = WIDTH / 16;
    let pairs = panel.len() / WIDTH;
    assert!(left.iter().all(|row| row.len() == 2 * pairs), "factors differ in their inner dimension");
    // SAFETY: both types are 64 bytes without a meaning of their own.
    let halves = |register: __m512i| unsafe { std::mem::transmute::<__m512i, __m512bh>(register) };
    let mut registers: [[__m512; REGISTERS]; T] = std::array::from_fn(|t| {
        // SAFETY: a row of sums is as wide as four registers.
        std::array::from_fn(|r| unsafe { _mm512_loadu_ps(sums[t].as_ptr().add(16 * r)) })
    });
    for pair in 0..pairs {
        // SAFETY: the panel has `WIDTH` values for each pair.
        let columns: [_; REGISTERS] = std::array::from_fn(|r| unsafe {
            halves(_mm512_loadu_si512(panel.as_ptr().add(pair * WIDTH + 16 * r).cast()))
        });
        for (t, registers) in registers.iter_mut().enumerate() {
            // SAFETY: the row has two values for each pair.
            let both = unsafe { left[t].as_ptr().cast::<i32>().add(pair).read_unaligned() };
            let row = halves(_mm512_set1_epi32(both));
            for (sum, columns) in registers.iter_mut().zip(columns) {
                *sum = _mm512_dpbf16_ps(*sum, row, columns);
            }
        }
    }
    for (sums, registers) in sums.iter_mut().zip(registers) {
        for (r, register) in registers.into_iter().enumerate() {
            // SAFETY: as where they were loaded.
            unsafe { _mm512_storeu_ps(sums.as_mut_ptr().add(16 * r), register) };
        }
    }
}

#[cfg(not(target_arch = "x86_64"))]
unsafe fn add_products<const T: usize>(_: [&[bf16]; T], _: &[f32], _: &mut [[f32; WIDTH]; T]) {
    unreachable!("no left factor is made here")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        bfloat16::{narrow, widen},
        kernels::flex::{matrix, parallel::Work},
    };

    fn values(len: usize, seed: usize) -> Vec<f32> {
        (0..len).map(|i| ((i * 7919 + seed) % 1009) as f32 / 311.0 - 1.6).collect()
    }

    fn product(x: &[f32], right: RightFactor<'_>, [rows, depth, columns]: [usize; 3]) -> Vec<f32> {
        let left = LeftFactor::rounded(x, [rows, depth]);
        matrix::build([rows, columns], WIDTH, Work::values(0), |range, out| left.product(right, range, out))
    }

    #[test]
    fn sums_are_those_of_rounded_factors_and_each_is_of_its_row_and_column_alone() {
        if !is_available() {
            return eprintln!("skipped: this processor has no AVX512-BF16");
        }
        for [rows, depth, columns] in [[1, 2, 1], [5, 34, 70], [13, 1026, 64], [7, 3000, 65], [6, 64, 128]] {
            let x = values(rows * depth, 3);
            let w: Vec<bf16> = values(columns * depth, 11).into_iter().map(narrow).collect();
            let plain: Vec<bf16> =
                (0..depth * columns).map(|i| w[i % columns * depth + i / columns]).collect();
            let y = product(&x, RightFactor::Transposed(&w), [rows, depth, columns]);
            assert_eq!(y, product(&x, RightFactor::Plain(&plain, columns), [rows, depth, columns]));
            for (i, &y) in y.iter().enumerate() {
                let (row, column) = (&x[i / columns * depth..][..depth], &w[i % columns * depth..][..depth]);
                let terms =
                    row.iter().zip(column).map(|(x, w)| f64::from(widen(narrow(*x))) * f64::from(widen(*w)));
                let (exact, size) =
                    terms.fold((0.0, 0.0), |(sum, size), term| (sum + term, size + term.abs()));
                let roundings = f64::from(f32::EPSILON) * (depth / 2).max(2) as f64;
                assert!((f64::from(y) - exact).abs() <= roundings * size, "{i}: {y} for {exact}");
                assert_eq!([y], *product(row, RightFactor::Transposed(column), [1, depth, 1]), "{i} alone");
            }
        }
    }
}
