//! AdamW on a part whose moments lie in host memory (`memory.offload: optimizer` beside a device): piece by
//! piece they are brought to the device, updated with the weights and gradients that are there, and taken
//! back, while the next piece is on its way.
//!
//! It saves 8 bytes an element of the part, and 12 of a replica's, for as many over the bus in each direction
//! in every step. The arithmetic, and so the bits, are those of moments that stay. Both ways lead through
//! page-locked memory, of which two pieces of each buffer are in use at most.

use std::ops::Range;

use burn::tensor::{Tensor, Transaction};

use super::{
    Flat, OnDevice,
    adamw::{Part, Run},
    tensors::{Origins, Updates, pieces},
};
use crate::kernels::ModelBackend;

/// Elements that are brought at once, 4 MiB: the bus needs as long for them as the host for some launches.
#[cfg(not(test))]
const PIECE: usize = 1 << 20;
/// In tests small buffers are cut as well.
#[cfg(test)]
const PIECE: usize = 100;

/// Updates runs of a part.
pub(super) fn adamw<B: ModelBackend>(part: Part<'_, OnDevice<B>>, runs: &[Run]) {
    let Part { weights, weights_from, mut state, grads, grads_from } = part;
    let grads = grads.tensor();
    let mut before: Option<Piece<B>> = None;
    let of_run = |run: &Run| pieces(&run.range, PIECE).map(|at| (at, run.coefficients)).collect::<Vec<_>>();
    for (at, coefficients) in runs.iter().flat_map(of_run) {
        // A replica's weights lie where its moments do.
        let (weights_there, weights_at) = match weights.is_offloaded() {
            true => (weights.upload(weights_from + at.start..weights_from + at.end), 0),
            false => (weights.taken(), weights_from + at.start),
        };
        let brought = state.each_ref().map(|buffer| buffer.upload(at.clone()));
        let there = Updates { weights: weights_there, state: brought };
        let from = Origins { weights: weights_at, grads: grads_from + at.start };
        let run = Run { range: 0..at.len(), coefficients };
        let Updates { weights: updated, state: tensors } = B::flat_adamw(there, &grads, from, &[run]);
        let mut piece = Piece { at, weights_from, weights: None, state: tensors };
        match weights.is_offloaded() {
            true => piece.weights = Some(updated),
            false => weights.give_back(updated),
        }
        if let Some(before) = before.replace(piece) {
            before.take_back(weights, &mut state);
        }
    }
    if let Some(last) = before {
        last.take_back(weights, &mut state);
    }
}

/// A piece that has been updated, on the device.
struct Piece<B: ModelBackend> {
    at: Range<usize>,
    weights_from: usize,
    /// Where weights lie in host memory, too.
    weights: Option<Tensor<B, 1>>,
    state: [Tensor<B, 1>; 2],
}

impl<B: ModelBackend> Piece<B> {
    /// Reads it into the buffers that it is part of, with one wait for all.
    fn take_back(self, weights: &mut OnDevice<B>, state: &mut [&mut OnDevice<B>; 2]) {
        let Self { at, weights_from, weights: updated, state: tensors } = self;
        let mut places: Vec<_> = state.iter_mut().map(|buffer| (&mut **buffer, at.clone())).collect();
        if updated.is_some() {
            places.push((weights, weights_from + at.start..weights_from + at.end));
        }
        let tensors = tensors.into_iter().chain(updated);
        let read = tensors.fold(Transaction::default(), Transaction::register).execute();
        for ((buffer, range), data) in places.into_iter().zip(read) {
            let data = data.as_slice::<f32>().expect("the flat parameter buffer is fp32 by construction");
            buffer.edit(|values| values[range].copy_from_slice(data));
        }
    }
}
