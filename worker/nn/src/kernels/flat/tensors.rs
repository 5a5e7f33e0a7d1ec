//! What is done to flat buffers in a device's memory, in burn's own operations: correct on any backend, and
//! as fast as a chain of elementwise kernels is. A backend with kernels of its own replaces them
//! ([`ModelBackend`](crate::kernels::ModelBackend)).
//!
//! Buffers come by value and go back by value: burn changes one on a GPU in place if it has no other owner,
//! and copies it first if it has. (Flex, which stands in for a GPU in tests, always copies; a GPU's test
//! looks at addresses.)

use std::ops::Range;

use burn::tensor::{DType, IndexingUpdateOp, Int, Tensor, TensorData, backend::Backend};

use super::RowGradients;

/// Elements worked on at once: temporary tensors take 64 MiB each, however large a parameter is.
#[cfg(not(test))]
pub(super) const PIECE: usize = 16 << 20;
/// In tests small buffers are cut as well.
#[cfg(test)]
pub(super) const PIECE: usize = 2 * BLOCK + 100;
/// Squares added up in float32 on the device; the sums of these blocks are added up on the host, in float64.
pub(in crate::kernels) const BLOCK: usize = 4 << 10;

/// The buffers that an update changes. `weights` may be longer than the part, which begins at `weights_from`.
#[derive(Clone, Debug)]
pub struct Updates<B: Backend> {
    /// Weights.
    pub weights: Tensor<B, 1>,
    /// The rule's state of the part.
    pub state: [Tensor<B, 1>; 2],
}

/// Where a part begins in buffers that are longer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Origins {
    /// In the weights.
    pub weights: usize,
    /// In the gradients.
    pub grads: usize,
}

/// `flat[start..] += gradient`; `first`: `flat[start..] = gradient`.
pub fn accumulate<B: Backend>(
    flat: Tensor<B, 1>,
    start: usize,
    gradient: Tensor<B, 1>,
    first: bool,
) -> Tensor<B, 1> {
    let [len] = gradient.dims();
    if first {
        return put(flat, start..start + len, gradient);
    }
    pieces(&(0..len), PIECE).fold(flat, |flat, piece| {
        let at = start + piece.start..start + piece.end;
        let sum = part(&flat, &at) + part(&gradient, &piece);
        put(flat, at, sum)
    })
}

/// Adds gradients of a table's rows, to what is there.
pub fn add_rows<B: Backend>(flat: Tensor<B, 1>, gradients: RowGradients<'_, B>) -> Tensor<B, 1> {
    let RowGradients { range, lookups, values_nd, .. } = gradients;
    let (width, device) = (values_nd.dims()[1], flat.device());
    let indices = |rows: Vec<u32>| -> Tensor<B, 1, Int> {
        let rows: Vec<i32> = rows.into_iter().map(|row| row as i32).collect();
        let len = rows.len();
        Tensor::from_data(TensorData::new(rows, [len]), &device)
    };
    let table_rd = part(&flat, &range).reshape([range.len() / width, width]);
    let table_rd = lookups.rounds().fold(table_rd, |table_rd, round| {
        let [rows, places] = round.map(indices);
        table_rd.select_assign(0, rows, values_nd.clone().select(0, places), IndexingUpdateOp::Add)
    });
    let len = range.len();
    put(flat, range, table_rd.reshape([len]))
}

/// `flat[range] = halves[range]`, in float32.
pub fn widen<B: Backend>(flat: Tensor<B, 1>, halves: &Tensor<B, 1>, range: &Range<usize>) -> Tensor<B, 1> {
    let wide = part(halves, range).cast(DType::F32);
    put(flat, range.clone(), wide)
}

/// Sums of squares of consecutive blocks of these elements, in any order: one number a block, so that
/// overflow and a value that is not finite show as such.
pub fn squares<B: Backend>(flat: &Tensor<B, 1>, range: &Range<usize>) -> Vec<Tensor<B, 1>> {
    let of_piece = |piece: Range<usize>| {
        let whole = piece.start..piece.start + piece.len() / BLOCK * BLOCK;
        let rest = whole.end..piece.end;
        [(whole.clone(), whole.len() / BLOCK), (rest, 1)].into_iter().filter(|(at, _)| !at.is_empty())
    };
    let sum = |(at, blocks): (Range<usize>, usize)| {
        let x_nb = part(flat, &at).reshape([blocks, at.len() / blocks]);
        (x_nb.clone() * x_nb).sum_dim(1).reshape([blocks])
    };
    pieces(range, PIECE).flat_map(of_piece).map(sum).collect()
}

/// The first `len` elements of `flat` go `share` of their way to those of `towards` from `from` on.
pub fn approach<B: Backend>(
    flat: Tensor<B, 1>,
    towards: &Tensor<B, 1>,
    from: usize,
    len: usize,
    share: f32,
) -> Tensor<B, 1> {
    pieces(&(0..len), PIECE).fold(flat, |flat, at| {
        let here = part(&flat, &at);
        let there = part(towards, &(from + at.start..from + at.end));
        put(flat, at, here.clone() + (there - here) * share)
    })
}

/// Exchanges the elements from `from` on of `flat` with the first `len` of `values`.
pub fn exchange<B: Backend>(
    flat: Tensor<B, 1>,
    values: Tensor<B, 1>,
    from: usize,
    len: usize,
) -> (Tensor<B, 1>, Tensor<B, 1>) {
    pieces(&(0..len), PIECE).fold((flat, values), |(flat, values), at| {
        let there = from + at.start..from + at.end;
        // Multiplied to be a copy: of a mere view the whole buffer would be copied before it changes.
        let ours = part(&flat, &there) * 1.0;
        let theirs = part(&values, &at);
        (put(flat, there, theirs), put(values, at, ours))
    })
}

pub(super) fn part<B: Backend>(flat: &Tensor<B, 1>, range: &Range<usize>) -> Tensor<B, 1> {
    flat.clone().slice([range.clone()])
}

pub(super) fn put<B: Backend>(flat: Tensor<B, 1>, range: Range<usize>, values: Tensor<B, 1>) -> Tensor<B, 1> {
    match range.is_empty() {
        true => flat,
        false => flat.slice_assign([range], values),
    }
}

/// A range in pieces of `len` elements that are worked on one after another.
pub(super) fn pieces(range: &Range<usize>, len: usize) -> impl Iterator<Item = Range<usize>> + use<> {
    let end = range.end;
    range.clone().step_by(len).map(move |start| start..(start + len).min(end))
}
