//! The largest magnitude among elements in host memory.
//!
//! Magnitudes of floats are ordered as their bits are, infinity above all numbers and NaN above infinity, so
//! one maximum of integers says how large elements are and whether all are numbers.

use rayon::prelude::*;

use crate::kernels::vectorised;

/// Elements given to a thread at once.
const BLOCK: usize = 64 << 10;
/// All bits but the sign's.
const MAGNITUDE: u32 = 0x7fff_ffff;

/// The largest magnitude; 0 of no elements, NaN if one of them is NaN.
pub fn largest(values: &[f32]) -> f32 {
    let block = |values: &[f32]| {
        vectorised(
            #[inline(always)]
            || values.iter().fold(0, |most: u32, value| most.max(value.to_bits() & MAGNITUDE)),
        )
    };
    f32::from_bits(values.par_chunks(BLOCK).map(block).max().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_element_that_is_no_number_is_found_wherever_it_is() {
        assert_eq!(largest(&[]), 0.0);
        assert_eq!(largest(&[1.0, -3.0, f32::MIN_POSITIVE]), 3.0);
        let mut values = vec![-2.5f32; 2 * BLOCK + 13];
        assert_eq!(largest(&values), 2.5);
        for place in [0, BLOCK, 2 * BLOCK + 12] {
            for (found, is_found) in [
                (f32::NEG_INFINITY, (|it| it == f32::INFINITY) as fn(f32) -> bool),
                (f32::NAN, f32::is_nan),
                (-f32::NAN, f32::is_nan),
            ] {
                let before = std::mem::replace(&mut values[place], found);
                assert!(is_found(largest(&values)), "{found} at {place}");
                values[place] = before;
            }
        }
    }
}
