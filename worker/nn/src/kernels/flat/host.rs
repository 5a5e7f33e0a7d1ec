//! Buffers in host memory.
//!
//! Every operation is one pass on as many threads as there are, and none copies: a tensor of a backend that
//! is in host memory too gives its elements away and takes them back. On any other backend what is taken from
//! a tensor is read back.

use std::{borrow::Cow, ops::Range};

use burn::tensor::{Tensor, TensorData, Transaction};
use half::bf16;
use rayon::prelude::*;

use super::{
    Flat, FlatOn, Gradient, Halves, LentBuffer, Product, RowGradients,
    adamw::{self, Average, Part, Run, approach_here},
    squares::{sum_of_squares, sums_of_squares},
};
use crate::{
    bfloat16::{narrow, widen},
    kernels::{GradientSlot, ModelBackend, vectorised},
    profile,
};

/// Elements given to a thread at once where nothing but their type changes.
const TASK: usize = 64 << 10;

impl Flat for Vec<f32> {
    type Place = ();
    /// Empty until the first use.
    type Halves = Vec<bf16>;

    fn of((): &(), values: Vec<f32>) -> Self {
        values
    }

    fn zeros((): &(), len: usize) -> Self {
        vec![0.0; len]
    }

    fn len(&self) -> usize {
        self.len()
    }

    fn read(&self, range: Range<usize>) -> Cow<'_, [f32]> {
        Cow::Borrowed(&self[range])
    }

    fn edit<R>(&mut self, edit: impl FnOnce(&mut [f32]) -> R) -> R {
        edit(self)
    }

    fn edit_all<const N: usize>(buffers: [&mut Self; N], edit: impl FnOnce([&mut [f32]; N])) {
        edit(buffers.map(Vec::as_mut_slice));
    }

    fn clear(&mut self, range: Range<usize>) {
        let _op = profile::operation("zeroing of gradients");
        self[range].fill(0.0);
    }

    fn squares(&self, ranges: &[Range<usize>]) -> f64 {
        let _op = profile::operation("norm of the gradient");
        ranges.iter().map(|range| sum_of_squares(&self[range.clone()])).sum()
    }

    fn squares_by_run(&self, range: Range<usize>, runs: &[Range<usize>]) -> (f64, Vec<f64>) {
        let _op = profile::operation("norm of the gradient");
        let runs: Vec<_> = runs.iter().map(|run| run.start - range.start..run.end - range.start).collect();
        sums_of_squares(&self[range], &runs)
    }

    fn adamw(part: Part<'_, Self>, runs: &[Run], average: Option<Average<'_, Self>>) {
        let _op = profile::operation(if average.is_some() { "AdamW with average" } else { "AdamW" });
        adamw::update(part, runs, average);
    }

    fn approach(&mut self, towards: &Self, from: usize, share: f32) {
        let _op = profile::operation("average of the weights");
        approach(self, &towards[from..], share);
    }

    fn exchange(&mut self, from: usize, part: &mut Self) {
        self[from..from + part.len()].swap_with_slice(part);
    }

    fn lend(&mut self) -> LentBuffer<'_, f32> {
        LentBuffer::Host(self)
    }

    fn narrow(&self, halves: &mut Vec<bf16>) {
        let _op = profile::operation("conversion to bf16");
        halves.resize(self.len(), bf16::ZERO);
        convert(self, halves, narrow);
    }

    fn widen(&mut self, halves: &Vec<bf16>, range: Range<usize>) {
        let _op = profile::operation("conversion from bf16");
        convert(&halves[range.clone()], &mut self[range], widen);
    }
}

impl<B: ModelBackend> FlatOn<B> for Vec<f32> {
    fn place(_device: &B::Device) {}

    fn from_tensor(tensor: Tensor<B, 1>, len: usize) -> Self {
        let mut values: Self =
            tensor.into_data().into_vec().expect("the flat parameter buffer is fp32 by construction");
        values.truncate(len);
        values
    }

    fn into_tensor(self, device: &B::Device) -> Tensor<B, 1> {
        let len = self.len();
        Tensor::from_data(TensorData::new(self, [len]), device)
    }

    fn add(&mut self, gradients: Vec<Gradient<B>>) {
        let _op = profile::operation("gradient accumulation");
        if gradients.is_empty() {
            return;
        }
        // One transaction for all of them: a device is waited for once a block, not once a parameter.
        let (slots, values): (Vec<_>, Vec<_>) =
            gradients.into_iter().map(|it| ((it.range, it.first), it.values)).unzip();
        let read = values.into_iter().fold(Transaction::default(), Transaction::register).execute();
        for ((range, stale), values) in slots.into_iter().zip(read) {
            let values = values.as_slice::<f32>().expect("gradients of fp32 leaves are fp32");
            GradientSlot { values: &mut self[range], stale }.add(values);
        }
    }

    fn add_products(&mut self, products: Vec<Product<B>>) {
        for Product { range, first, dy_no, x_ni } in products {
            let sum = GradientSlot { values: &mut self[range], stale: first };
            B::add_linear_weight_gradient(dy_no, x_ni, sum);
        }
    }

    fn add_rows(&mut self, gradients: RowGradients<'_, B>) {
        let _op = profile::operation("embedding, weight gradient");
        let RowGradients { range, first, lookups, values_nd } = gradients;
        let (width, mut table, mut before) = (values_nd.dims()[1], &mut self[range], 0);
        if first {
            table.par_chunks_mut(TASK).for_each(|values| values.fill(0.0));
        }
        let mut sums = Vec::with_capacity(lookups.rows().len());
        for (row, places) in lookups.iter() {
            let begin = row as usize * width;
            table.split_off_mut(..begin - before).expect("rows lie in the table, each behind the last");
            let sum = table.split_off_mut(..width).expect("a table has whole rows");
            sums.push((sum, places));
            before = begin + width;
        }
        let values = values_nd.into_data();
        let values = values.as_slice::<f32>().expect("gradients of fp32 leaves are fp32");
        sums.into_par_iter().for_each(|(sum, places)| {
            for &place in places {
                let value = &values[place as usize * width..][..width];
                sum.iter_mut().zip(value).for_each(|(sum, value)| *sum += value);
            }
        });
    }
}

impl Halves for Vec<bf16> {
    fn lend(&mut self) -> LentBuffer<'_, bf16> {
        LentBuffer::Host(self)
    }

    fn bytes(&self) -> u64 {
        size_of_val(self.as_slice()) as u64
    }
}

/// [`Flat::approach`] in host memory. A multiplication and an addition, never fused: the same bits wherever
/// it runs.
pub(super) fn approach(values: &mut [f32], towards: &[f32], share: f32) {
    let pieces = values.par_chunks_mut(TASK).zip(towards.par_chunks(TASK));
    pieces.for_each(|(values, towards)| approach_here(values, towards, share));
}

/// Converts on as many threads as there are.
#[inline(always)]
fn convert<T: Copy + Sync, U: Send>(from: &[T], to: &mut [U], one: impl Fn(T) -> U + Sync) {
    to.par_chunks_mut(TASK).zip(from.par_chunks(TASK)).for_each(|(to, from)| {
        vectorised(
            #[inline(always)]
            || to.iter_mut().zip(from).for_each(|(to, from)| *to = one(*from)),
        )
    });
}
