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

use std::{fmt, io};

use coxswain_nn::kernels::flat::{Flat, largest};

use super::{optimizer::ShardedAdamW, partition::shifted, replica::ReplicatedAdamW, state::KINDS};

/// The first of a rank's values that nothing can go on from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnsoundValue {
    /// `weights`, `exp_avg`, `exp_avg_sq` or `ema`.
    kind: &'static str,
    parameter: String,
}

impl fmt::Display for UnsoundValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, parameter } = self;
        let what = match *kind {
            "weights" => "weights are",
            "ema" => "the average of the weights is",
            _ => "moments are",
        };
        write!(f, "{what} not finite, or beyond 1.8e19, first in {parameter}")
    }
}

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

impl<F: Flat> ShardedAdamW<F> {
    fn first_unsound(&self, weights: &F) -> Option<UnsoundValue> {
        let begin = self.partition.own().start;
        let names = self.own_pieces().map(|(param, range)| {
            let whole = param.offset + range.start..param.offset + range.end;
            (&param.name, whole)
        });
        for (parameter, whole) in names {
            let of = |kind| UnsoundValue { kind, parameter: parameter.clone() };
            if !are_sound_weights(&weights.read(whole.clone())) {
                return Some(of("weights"));
            }
            for (kind, buffer) in KINDS.into_iter().zip(self.buffers()) {
                if check(kind, &buffer.read(shifted(&whole, begin))).is_err() {
                    return Some(of(kind));
                }
            }
        }
        None
    }
}

impl<F: Flat> ReplicatedAdamW<F> {
    /// What of this rank's part nothing can go on from, if anything; `weights` are full length.
    pub fn first_unsound(&self, weights: &F) -> Option<UnsoundValue> {
        self.own.first_unsound(weights)
    }
}

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
            assert_eq!(check("exp_avg_sq", &[0.5, value]).is_ok(), is_moment, "{value}");
        }
    }
}
