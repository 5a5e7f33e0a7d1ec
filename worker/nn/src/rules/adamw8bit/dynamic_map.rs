//! The dynamic 8-bit data type (arXiv 1511.04561, 2110.02861): 256 values from -1 or 0 to 1 whose distances
//! shrink towards zero, and the code of a value.
//!
//! ```text
//! decade i of seven    10^(i - 6) times the middles of equal steps from 0.1 to 1: signed 2^i steps either
//!                      way, unsigned 2^(i + 1); then 0 and 1
//! ```
//!
//! A code is looked up as bitsandbytes does it on the CPU, to the same codes: a value goes to the nearest of
//! 65,536 points from -1 to 1, none of which is 0, and from there to the nearest of the 256. Beside its
//! block's largest a second moment is then never 0: rounded to 0 it would make the next update, a quotient by
//! its root, thousands of times too large where the gradient has gone and the first moment has not.

use std::sync::LazyLock;

/// Decades.
const DECADES: usize = 7;
/// Points at which codes are known.
const POINTS: usize = 1 << 16;
/// From one to the next they are as far apart as this many make up 1.
const POINTS_OF_ONE: f32 = (POINTS - 1) as f32 / 2.0;

/// The map of first moments.
pub(super) static SIGNED: LazyLock<DynamicMap> = LazyLock::new(|| DynamicMap::new(true));
/// The map of second moments, which are not negative.
pub(super) static UNSIGNED: LazyLock<DynamicMap> = LazyLock::new(|| DynamicMap::new(false));

/// 256 values in ascending order.
#[derive(Debug)]
pub(super) struct DynamicMap {
    values: [f32; 256],
    /// The code of each point.
    codes: Box<[u8]>,
}

impl DynamicMap {
    fn new(signed: bool) -> Self {
        let mut values = Vec::with_capacity(256);
        for decade in 0..DECADES {
            let scale = 10f64.powi(decade as i32 + 1 - DECADES as i32) as f32;
            let steps = if signed { 1 << decade } else { 2 << decade };
            for mean in means(steps) {
                values.push(scale * mean);
                if signed {
                    values.push(-scale * mean);
                }
            }
        }
        values.extend([0.0, 1.0]);
        values.sort_by(f32::total_cmp);
        let values: [f32; 256] = values.try_into().expect("seven decades have 254 values");
        let nearest = |point: usize| {
            let at = point as f32 / POINTS_OF_ONE - 1.0;
            let after = values.partition_point(|value| *value < at).clamp(1, 255);
            let before = after - 1;
            if at - values[before] <= values[after] - at { before as u8 } else { after as u8 }
        };
        Self { values, codes: (0..POINTS).map(nearest).collect() }
    }

    /// The values of a block.
    pub fn dequantize(&self, codes: &[u8], absmax: f32, values: &mut [f32]) {
        values.iter_mut().zip(codes).for_each(|(value, code)| *value = self.values[*code as usize] * absmax);
    }

    /// The codes of a block's values, and the largest of their magnitudes, which scales them.
    pub fn quantize(&self, values: &[f32], codes: &mut [u8]) -> f32 {
        let absmax = values.iter().fold(0.0f32, |most, value| most.max(value.abs()));
        if absmax == 0.0 {
            codes.fill(0);
            return absmax;
        }
        let inverse = 1.0 / absmax;
        for (code, value) in codes.iter_mut().zip(values) {
            let point = (value * inverse + 1.0) * POINTS_OF_ONE + 0.5;
            *code = self.codes[(point as usize).min(POINTS - 1)];
        }
        absmax
    }
}

/// The middles of equal steps from 0.1 to 1, with the roundings of `torch.linspace`, which multiplies and
/// adds in one.
fn means(steps: usize) -> Vec<f32> {
    let (start, end) = (0.1f32, 1.0f32);
    let step = (end - start) / steps as f32;
    let border = |number: usize| match number < steps.div_ceil(2) {
        true => step.mul_add(number as f32, start),
        false => (-step).mul_add((steps - number) as f32, end),
    };
    (0..steps).map(|number| (border(number) + border(number + 1)) / 2.0).collect()
}

#[cfg(test)]
impl DynamicMap {
    /// All values, in ascending order.
    pub fn values(&self) -> &[f32; 256] {
        &self.values
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_value_comes_back_as_near_as_the_points_and_the_values_lie(value in -1.0f32..=1.0) {
            for map in [&*SIGNED, &*UNSIGNED] {
                let value = if map.values[0] == 0.0 { value.abs() } else { value };
                let (mut codes, mut again) = ([0; 2], [0.0; 2]);
                prop_assert_eq!(map.quantize(&[1.0, value], &mut codes), 1.0);
                map.dequantize(&codes, 1.0, &mut again);
                let nearest = map.values.iter().map(|of| (of - value).abs()).fold(f32::INFINITY, f32::min);
                prop_assert!((again[1] - value).abs() <= nearest + 1.01 / POINTS_OF_ONE, "{again:?} for {value}");
            }
        }
    }

    #[test]
    fn beside_a_larger_one_no_second_moment_is_zero() {
        let (mut codes, mut values) = ([0; 3], [0.0; 3]);
        let absmax = UNSIGNED.quantize(&[0.5, 1e-20, 0.0], &mut codes);
        UNSIGNED.dequantize(&codes, absmax, &mut values);
        assert!(values[0] == 0.5 && values[1..].iter().all(|value| *value > 5e-6 && *value < 1e-5));
    }

    #[test]
    fn a_block_of_zeros_stays_one() {
        let (mut codes, mut values) = ([7; 4], [1.0; 4]);
        let absmax = UNSIGNED.quantize(&[0.0; 4], &mut codes);
        UNSIGNED.dequantize(&codes, absmax, &mut values);
        assert_eq!((absmax, values), (0.0, [0.0; 4]));
    }
}
