//! Whether a state is one that training can go on from.
//!
//! ```text
//! weights, and their average   finite, and so is the square of each: beyond 1.8e19 a norm, and a product of
//!                              two of them, is infinite
//! moments                      finite
//! ```
//!
//! A gradient that is not finite is found before anything has changed. What an update makes of finite
//! gradients is not: it is looked at where it is written to a checkpoint, piece by piece as the pieces are
//! read for that, and where a loss or gradient is not finite.

use std::io;

use coxswain_nn::kernels::flat::largest;

/// Whether these are weights that training can go on from.
pub fn are_sound_weights(values: &[f32]) -> bool {
    let largest = largest(values);
    (largest * largest).is_finite()
}

/// Passes on moments, or an average of weights, that training can go on from.
pub(super) fn check(kind: &str, values: &[f32]) -> io::Result<()> {
    let sound = if kind == AVERAGE { are_sound_weights(values) } else { largest(values).is_finite() };
    if sound { Ok(()) } else { Err(io::ErrorKind::InvalidData.into()) }
}

const AVERAGE: &str = "ema";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_no_product_can_carry_is_no_weight_and_may_be_a_moment() {
        for (value, is_weight, is_moment) in [
            (1e19, true, true),
            (-1e20, false, true),
            (f32::NAN, false, false),
            (f32::INFINITY, false, false),
        ] {
            assert_eq!(are_sound_weights(&[0.5, value]), is_weight, "{value}");
            assert_eq!(check("ema", &[0.5, value]).is_ok(), is_weight, "{value}");
            assert_eq!(check("moments", &[0.5, value]).is_ok(), is_moment, "{value}");
        }
    }
}
