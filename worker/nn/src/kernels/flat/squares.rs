//! The sum of squares of elements in host memory, in f64.
//!
//! They are cut in fixed blocks, each block is summed in interleaved lanes, and the blocks' sums are added in
//! order: threads only decide who sums which block, so their number does not change a bit. A square of an f32
//! is exact in f64, and 2^53 of them can be added before rounding matters; overflow is impossible, so a sum
//! that is not finite means that a gradient is not.

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
