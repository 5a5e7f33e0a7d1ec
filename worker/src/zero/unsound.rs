//! The first value of a rank's weights and state that training cannot go on from, by parameter.

use std::fmt;

use coxswain_nn::{kernels::flat::Flat, rules::StateValues};

use super::{
    optimizer::ShardedOptimizer,
    replica::ReplicatedOptimizer,
    soundness::{are_sound_weights, check},
    state::AVERAGE,
};

/// The first of a rank's values that nothing can go on from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnsoundValue {
    /// `weights`, `ema`, or the name of a buffer of the update rule's state.
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
        write!(f, "{what} not finite, or beyond 1.8e19 (first in {parameter})")
    }
}

impl<F: Flat> ReplicatedOptimizer<F> {
    /// What of this rank's part nothing can go on from, if anything; `weights` are full length.
    pub fn first_unsound(&self, weights: &F) -> Option<UnsoundValue> {
        let ShardedOptimizer { layout, partition, rule, pieces, state, average, .. } = &self.own;
        let begin = partition.own().start;
        pieces.iter().find_map(|piece| {
            let of = |kind| UnsoundValue { kind, parameter: layout.params()[piece.param].name.clone() };
            if !are_sound_weights(&weights.read(begin + piece.range.start..begin + piece.range.end)) {
                return Some(of("weights"));
            }
            let buffers = rule.rule.state().iter().zip(state).zip(&piece.state);
            let floats = buffers.filter_map(|((buffer, values), range)| match values {
                StateValues::Float32(values) => Some((buffer.name, values, range)),
                StateValues::Uint8(_) => None,
            });
            let averages = average.iter().map(|average| (AVERAGE.name, &average.values, &piece.range));
            let mut all = floats.chain(averages);
            all.find(|(kind, values, range)| check(kind, &values.read((*range).clone())).is_err())
                .map(|(kind, ..)| of(kind))
        })
    }
}
