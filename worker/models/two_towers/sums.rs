//! Gradients that meet, and whether there are any.

use burn::tensor::Tensor;
use coxswain_nn::{kernels::Tape, recompute::Layers};

/// The sum of what is there.
pub fn sum<B: Tape<Base = B>>(
    one: Option<Tensor<B, 2>>,
    other: Option<Tensor<B, 2>>,
) -> Option<Tensor<B, 2>> {
    match (one, other) {
        (Some(one), Some(other)) => Some(one + other),
        (one, other) => one.or(other),
    }
}

/// Whether anything in these layers trains.
pub fn trains<B: Tape<Base = B>>(layers: &impl Layers<B>) -> bool {
    (0..layers.count()).any(|index| layers.trains(index))
}
