//! The flat parameter buffer, where a backend's tensors lie.

use std::ops::Range;

use burn::tensor::{Tensor, backend::Backend};

use super::flat::{
    FlatOn, Gradient, RowGradients, Run, adamw,
    tensors::{self, Origins, Updates},
};

/// What a backend does to the buffer of everything that trains.
pub trait FlatOps: Backend {
    /// Where the flat parameter buffer of what trains lies: where this backend's tensors do. (A tape has
    /// none: it is that of the backend underneath.)
    type Flat: FlatOn<Self>;

    /// The elements of `flat` from `start` on as a matrix, without a copy where the backend allows it.
    fn matrix_view(flat: Tensor<Self, 1>, start: usize, shape: [usize; 2]) -> Tensor<Self, 2> {
        flat.narrow(0, start, shape[0] * shape[1]).reshape(shape)
    }

    /// Adds gradients to their sums in `flat`; in place where it has no other owner.
    fn flat_accumulate(flat: Tensor<Self, 1>, gradients: Vec<Gradient<Self>>) -> Tensor<Self, 1> {
        gradients.into_iter().fold(flat, |flat, Gradient { range, first, values }| {
            tensors::accumulate(flat, range.start, values.reshape([range.len()]), first)
        })
    }

    /// Adds gradients of a table's rows to what is there, each row's in the order of its lookups; in place
    /// where `flat` has no other owner.
    fn flat_add_rows(flat: Tensor<Self, 1>, gradients: RowGradients<'_, Self>) -> Tensor<Self, 1> {
        tensors::add_rows(flat, gradients)
    }

    /// Sums of squares of parts of a range, a few thousand elements each, to be added up in float64.
    fn flat_squares(flat: &Tensor<Self, 1>, range: &Range<usize>) -> Vec<Tensor<Self, 1>> {
        tensors::squares(flat, range)
    }

    /// `flat[range] = halves[range]`, in float32; in place where `flat` has no other owner.
    fn flat_widen(flat: Tensor<Self, 1>, halves: &Tensor<Self, 1>, range: &Range<usize>) -> Tensor<Self, 1> {
        tensors::widen(flat, halves, range)
    }

    /// AdamW on runs of a part; in place where the buffers have no other owner.
    fn flat_adamw(
        state: Updates<Self>,
        grads: &Tensor<Self, 1>,
        from: Origins,
        runs: &[Run],
    ) -> Updates<Self> {
        runs.iter().fold(state, |state, run| adamw::update_tensors(state, grads, from, run))
    }
}
