//! Rounding to bfloat16, and from one type to the other: one pass over memory each.
//!
//! What it does not do: decide what is rounded when (`params::held`).

use half::bf16;

use super::{
    parallel::{self, Work},
    rows, simd,
};
use crate::bfloat16::{narrow, widen};

/// Rounds values where they lie.
pub fn round(values: &mut [f32]) {
    in_place(
        values,
        #[inline(always)]
        |_, block| block.iter_mut().for_each(|value| *value = widen(narrow(*value))),
    );
}

/// `sum = round(x + sum)`.
pub fn add_rounding(x: &[f32], sum: &mut [f32]) {
    assert_eq!(x.len(), sum.len(), "rounded_sum: x and y have one shape");
    in_place(
        sum,
        #[inline(always)]
        |start, block| {
            for (sum, x) in block.iter_mut().zip(&x[start..]) {
                *sum = widen(narrow(x + *sum));
            }
        },
    );
}

/// To the nearest bfloat16.
pub fn narrowed(values: &[f32]) -> Vec<bf16> {
    converted(values, narrow)
}

/// Exact.
pub fn widened(values: &[bf16]) -> Vec<f32> {
    converted(values, widen)
}

fn converted<S: rows::Element + Sync, E: rows::Element>(
    values: &[S],
    convert: impl Fn(S) -> E + Sync,
) -> Vec<E> {
    rows::build(values.len(), 1, |start, out: &mut [E]| {
        simd::vectorised(
            #[inline(always)]
            || out.iter_mut().zip(&values[start..]).for_each(|(out, &value)| *out = convert(value)),
        );
    })
}

/// `change` gets every block of `values` once, with its start.
fn in_place(values: &mut [f32], change: impl Fn(usize, &mut [f32]) + Sync) {
    let work = Work::values(values.len());
    let blocks = values.chunks_mut(rows::BLOCK).enumerate().collect();
    parallel::for_each(blocks, work, |(number, block): (usize, &mut [f32])| {
        simd::vectorised(
            #[inline(always)]
            || change(number * rows::BLOCK, block),
        );
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_rounded_once_each_and_in_the_right_place() {
        for len in [0, 1, rows::BLOCK - 1, rows::BLOCK, 3 * rows::BLOCK + 17] {
            let values: Vec<f32> = (0..len).map(|i| 1.0 + (i as f32) / 3.0).collect();
            let expected: Vec<f32> = values.iter().map(|&v| bf16::from_f32(v).to_f32()).collect();
            let mut rounded = values.clone();
            round(&mut rounded);
            assert_eq!(rounded, expected);
            assert_eq!(widened(&narrowed(&values)), expected);
            let mut doubled = values.clone();
            add_rounding(&values, &mut doubled);
            // Doubling moves the exponent alone.
            assert_eq!(doubled, expected.iter().map(|v| 2.0 * v).collect::<Vec<_>>());
        }
    }
}
