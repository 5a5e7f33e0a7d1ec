//! AdamW on a part whose moments lie in host memory (`memory.offload: optimizer` beside a device): piece by
//! piece they are brought to the device, updated with the weights and gradients that are there, and taken
//! back.
//!
//! It saves 8 bytes an element of the part, and 12 of a replica's, for as many over the bus in each direction
//! in every step. The arithmetic, and so the bits, are those of moments that stay.

use std::ops::Range;

use burn::tensor::{Tensor, Transaction};

use super::{
    Flat, OnDevice,
    adamw::{Part, Run},
    tensors::{Origins, Updated, pieces},
};
use crate::kernels::ModelBackend;

/// Updates runs of a part.
pub(super) fn adamw<B: ModelBackend>(part: Part<'_, OnDevice<B>>, runs: &[Run]) {
    let Part { weights, weights_from, exp_avg, exp_avg_sq, grads, grads_from } = part;
    let grads = grads.tensor();
    let of_run = |run: &Run| pieces(&run.range).map(|at| (at, run.coefficients)).collect::<Vec<_>>();
    for (at, coefficients) in runs.iter().flat_map(of_run) {
        // A replica's weights lie where its moments do.
        let (weights_there, weights_at) = match weights.is_offloaded() {
            true => (weights.upload(weights_from + at.start..weights_from + at.end), 0),
            false => (weights.taken(), weights_from + at.start),
        };
        let state = Updated {
            weights: weights_there,
            exp_avg: exp_avg.upload(at.clone()),
            exp_avg_sq: exp_avg_sq.upload(at.clone()),
        };
        let from = Origins { weights: weights_at, grads: grads_from + at.start };
        let run = Run { range: 0..at.len(), coefficients };
        let state = B::flat_adamw(state, &grads, from, &[run]);
        let mut back = vec![
            (&mut *exp_avg, at.clone(), state.exp_avg),
            (&mut *exp_avg_sq, at.clone(), state.exp_avg_sq),
        ];
        match weights.is_offloaded() {
            true => back.push((&mut *weights, weights_from + at.start..weights_from + at.end, state.weights)),
            false => weights.give_back(state.weights),
        }
        take_back(back);
    }
}

/// Reads tensors into elements of buffers, with one wait for all.
fn take_back<B: ModelBackend>(back: Vec<(&mut OnDevice<B>, Range<usize>, Tensor<B, 1>)>) {
    let (places, tensors): (Vec<_>, Vec<_>) =
        back.into_iter().map(|(buffer, range, tensor)| ((buffer, range), tensor)).unzip();
    let read = tensors.into_iter().fold(Transaction::default(), Transaction::register).execute();
    for ((buffer, range), data) in places.into_iter().zip(read) {
        let data = data.as_slice::<f32>().expect("the flat parameter buffer is fp32 by construction");
        buffer.edit(|values| values[range].copy_from_slice(data));
    }
}
