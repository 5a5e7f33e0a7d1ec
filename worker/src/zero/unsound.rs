//! The first value of a rank's weights and moments that training cannot go on from, by parameter.

use std::fmt;

use coxswain_nn::kernels::flat::Flat;

use super::{
    optimizer::ShardedAdamW,
    partition::shifted,
    replica::ReplicatedAdamW,
    soundness::{are_sound_weights, check},
    state::KINDS,
};

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
