//! The sum of squares of elements in host memory, in f64.
//!
//! They are cut in fixed blocks, each block is summed in interleaved lanes, and the blocks' sums are added in
//! order: threads only decide who sums which block, so their number does not change a bit. A square of an f32
//! is exact in f64, and 2^53 of them can be added before rounding matters; overflow is impossible, so a sum
//! that is not finite means that a gradient is not.

use std::ops::Range;

use rayon::prelude::*;

use crate::kernels::vectorised;

/// Elements of a block: 64 KiB, enough that handing it to a thread costs nothing in comparison.
const BLOCK: usize = 16 << 10;
/// Partial sums of a block: four of the widest registers, enough to hide the latency of an addition.
const LANES: usize = 32;

/// Sum of squares.
pub(super) fn sum_of_squares(values: &[f32]) -> f64 {
    let blocks: Vec<f64> = values.par_chunks(BLOCK).map(block).collect();
    blocks.into_iter().sum()
}

/// Sum of squares, and the sums of these runs of the values, which are read once: of a run only the ends are
/// read again that share a block with another one.
pub(super) fn sums_of_squares(values: &[f32], runs: &[Range<usize>]) -> (f64, Vec<f64>) {
    let blocks: Vec<f64> = values.par_chunks(BLOCK).map(block).collect();
    let of_run = |run: &Range<usize>| {
        let (first, last) = (run.start.div_ceil(BLOCK), run.end / BLOCK);
        if first >= last {
            return values[run.clone()].chunks(BLOCK).map(block).sum();
        }
        let ends = [run.start..first * BLOCK, last * BLOCK..run.end].map(|end| block(&values[end]));
        ends[0] + blocks[first..last].iter().sum::<f64>() + ends[1]
    };
    let of_runs = runs.iter().map(of_run).collect();
    (blocks.into_iter().sum(), of_runs)
}

fn block(values: &[f32]) -> f64 {
    vectorised(
        #[inline(always)]
        || {
            let square = |value: f32| f64::from(value) * f64::from(value);
            let mut lanes = [0.0f64; LANES];
            let (chunks, rest) = values.as_chunks::<LANES>();
            for chunk in chunks {
                for j in 0..LANES {
                    lanes[j] += square(chunk[j]);
                }
            }
            lanes.into_iter().sum::<f64>() + rest.iter().map(|&value| square(value)).sum::<f64>()
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_exact_where_f32_would_not_be() {
        let values = vec![1.0f32; 20_000_003];
        assert_eq!(sum_of_squares(&values), 20_000_003.0);
        assert_eq!(sum_of_squares(&[3.0, 4.0, 0.5]), 25.25);
    }

    #[test]
    fn runs_come_from_the_blocks_of_the_whole() {
        let values: Vec<f32> = (0..5 * BLOCK + 77).map(|i| ((i * 7919) % 1013) as f32 - 500.0).collect();
        let len = values.len();
        let borders = [0, 0, 3, BLOCK - 1, BLOCK, 2 * BLOCK + 9, 2 * BLOCK + 10, 4 * BLOCK, len, len];
        let runs: Vec<_> = borders.windows(2).map(|ends| ends[0]..ends[1]).chain([5..len - 5]).collect();
        let (whole, of_runs) = sums_of_squares(&values, &runs);
        assert_eq!(whole.to_bits(), sum_of_squares(&values).to_bits());
        // Whole numbers: every order of adding them up is exact.
        let expected = runs.iter().map(|run| sum_of_squares(&values[run.clone()]));
        assert_eq!(of_runs, expected.collect::<Vec<_>>());
    }

    #[test]
    fn the_number_of_threads_does_not_change_a_bit() {
        let values: Vec<f32> = (0..100_001).map(|i| ((i * 7919) % 1013) as f32 * 1.7e-3 - 0.8).collect();
        let in_pool = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool starts");
            pool.install(|| sum_of_squares(&values)).to_bits()
        };
        assert!([2, 3, 5].into_iter().all(|threads| in_pool(threads) == in_pool(1)));
    }

    #[test]
    fn one_bad_value_makes_the_sum_not_finite_and_large_ones_do_not() {
        assert!(!sum_of_squares(&[1.0, f32::NAN, 2.0]).is_finite());
        assert!(!sum_of_squares(&[1.0, f32::NEG_INFINITY]).is_finite());
        assert!(sum_of_squares(&[f32::MAX; 1000]).is_finite());
    }
}
