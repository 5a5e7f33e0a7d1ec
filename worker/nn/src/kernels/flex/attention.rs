//! Attention without the score matrix: forward and backward by blocks of queries.
//!
//! ```text
//! forward   S = scale Q K^T    P = exp(S - max)    O = P V / sum P    lse = max + ln sum P
//! backward  P = exp(scale Q K^T - lse)    D = rows of dO . O    dV = P^T dO
//!           dS = scale P * (dO V^T - D)    dQ = dS K    dK = dS^T Q
//! ```
//!
//! Only one block of scores exists per thread at a time (arXiv 2205.14135 without the online softmax: a block
//! sees all its keys at once, because a block's scores fit the second-level cache at the lengths this backend
//! is used for). Inputs are read and outputs written where they are, `[b, s, h, k]` with any strides but the
//! last; grouped heads read the same keys. A task is one block of one head (forward), or one component of one
//! key head (backward): every sum has one order.
//!
//! What it does not do: dropout, biases.

use std::{cmp::Reverse, ops::Range};

use super::{
    matrix::{Accumulate, Mat, MatMut, product},
    parallel::{self, Work},
    scratch, simd,
    spans::{self, Component, QueryBlock},
};
use crate::kernels::AttentionMask;

/// A `[b, s, h, k]` tensor to read.
#[derive(Clone, Copy)]
pub struct Heads<'a> {
    /// Storage from the first element on.
    pub data: &'a [f32],
    /// `[b, s, h, k]`.
    pub shape: [usize; 4],
    /// Distance of neighbours along `b`, `s` and `h`; along `k` it is 1.
    pub strides: [usize; 3],
}

impl<'a> Heads<'a> {
    fn matrix(&self, b: usize, h: usize, rows: Range<usize>) -> Mat<'a> {
        let start = b * self.strides[0] + rows.start * self.strides[1] + h * self.strides[2];
        Mat::new(&self.data[start.min(self.data.len())..], [rows.len(), self.shape[3]], self.strides[1])
    }
}

/// What both passes read.
#[derive(Clone, Copy)]
pub struct Inputs<'a> {
    /// Queries.
    pub q: Heads<'a>,
    /// Keys.
    pub k: Heads<'a>,
    /// Values.
    pub v: Heads<'a>,
    /// Who sees whom.
    pub mask: &'a AttentionMask,
    /// Factor of the scores.
    pub scale: f32,
}

impl Inputs<'_> {
    fn group(&self) -> usize {
        self.q.shape[2] / self.k.shape[2].max(1)
    }

    fn blocks(&self) -> Vec<Vec<QueryBlock>> {
        let [batch, queries, ..] = self.q.shape;
        (0..batch).map(|b| spans::blocks(self.mask, b, queries, self.k.shape[1])).collect()
    }
}

/// One block of queries of one head, in a batch row.
#[derive(Clone)]
struct Task {
    b: usize,
    head: usize,
    block: QueryBlock,
}

/// `(output [b, sq, heads, k], lse [b, sq, heads])`.
pub fn forward(inputs: &Inputs<'_>) -> (Vec<f32>, Vec<f32>) {
    let [batch, queries, heads, dim] = inputs.q.shape;
    let blocks = inputs.blocks();
    let mut out = vec![0.0; batch * queries * heads * dim];
    let mut lse = vec![0.0; batch * queries * heads];
    let out_views = by_block_and_head(&mut out, &blocks, [queries, heads, dim]).into_iter().flatten();
    let lse_views = by_block_and_head(&mut lse, &blocks, [queries, heads, 1]).into_iter().flatten();
    let tasks = blocks.iter().enumerate().flat_map(|(b, blocks)| {
        let task = move |block: &QueryBlock| {
            (0..heads).map({
                let block = block.clone();
                move |head| Task { b, head, block: block.clone() }
            })
        };
        blocks.iter().flat_map(task)
    });
    let mut tasks: Vec<_> = tasks.zip(out_views.zip(lse_views)).collect();
    // The longest first, or the last block of a causal mask would run alone at the end.
    tasks.sort_by_key(|(task, _)| Reverse(task.block.keys.len()));
    let work = work(&blocks, heads, 2 * 2 * dim);
    parallel::for_each(tasks, work, |(task, (out, lse))| forward_block(inputs, &task, out, lse));
    (out, lse)
}

/// The work of all scores, at so many operations each and an exponential.
fn work(blocks: &[Vec<QueryBlock>], heads: usize, flops: usize) -> Work {
    const EXPONENTIAL: usize = 64;
    let scores: usize =
        blocks.iter().flatten().map(|block| block.queries.len() * block.keys.len() * heads).sum();
    Work::products(scores * (flops + EXPONENTIAL))
}

/// Views of a `[b, s, h, width]` buffer: per batch row, per block, per head.
fn by_block_and_head<'a>(
    buffer: &'a mut [f32],
    blocks: &[Vec<QueryBlock>],
    [rows, heads, width]: [usize; 3],
) -> Vec<Vec<MatMut<'a>>> {
    let per_batch = buffer.chunks_exact_mut((rows * heads * width).max(1));
    let views = per_batch.zip(blocks).map(|(buffer, blocks)| {
        let blocks = MatMut::new(buffer, [rows, heads * width])
            .row_blocks(blocks.iter().map(|block| block.queries.len()));
        blocks.into_iter().flat_map(|block| block.col_blocks(width)).collect()
    });
    views.collect()
}

fn forward_block(inputs: &Inputs<'_>, task: &Task, mut out: MatMut<'_>, mut lse: MatMut<'_>) {
    let Task { b, head, block } = task;
    let (rows, cols) = (block.queries.len(), block.keys.len());
    if cols == 0 {
        return;
    }
    let kv_head = head / inputs.group();
    let q = inputs.q.matrix(*b, *head, block.queries.clone());
    let k = inputs.k.matrix(*b, kv_head, block.keys.clone());
    let v = inputs.v.matrix(*b, kv_head, block.keys.clone());
    scratch::with(rows * cols + rows, |scratch| {
        let (scores, sums) = scratch.split_at_mut(rows * cols);
        product(&mut MatMut::new(scores, [rows, cols]), Accumulate::Fresh, inputs.scale, q, k.t());
        simd::vectorised(
            #[inline(always)]
            || {
                for (i, row) in scores.chunks_exact_mut(cols).enumerate() {
                    let seen = seen(inputs, *b, block, i);
                    let (max, sum) = soft_max(row, seen);
                    sums[i] = sum;
                    lse.row(i)[0] = max + sum.ln();
                }
            },
        );
        product(&mut out, Accumulate::Fresh, 1.0, Mat::new(scores, [rows, cols], cols), v);
        for (i, &sum) in sums.iter().enumerate() {
            // A query that sees nothing gets zeros.
            let scale = if sum > 0.0 || sum.is_nan() { 1.0 / sum } else { 0.0 };
            out.row(i).iter_mut().for_each(|x| *x *= scale);
        }
    });
}

/// The keys that row `i` of a block sees, counted from the block's first key.
#[inline(always)]
fn seen(inputs: &Inputs<'_>, b: usize, block: &QueryBlock, i: usize) -> Range<usize> {
    let span = spans::span(inputs.mask, b, block.queries.start + i, inputs.k.shape[1]);
    if span.is_empty() { 0..0 } else { span.start - block.keys.start..span.end - block.keys.start }
}

/// Turns the scores of a row into `exp(score - max)`, zero outside `seen`; returns the maximum and the sum.
#[inline(always)]
fn soft_max(row: &mut [f32], seen: Range<usize>) -> (f32, f32) {
    row[..seen.start].fill(0.0);
    row[seen.end..].fill(0.0);
    let row = &mut row[seen];
    let max = simd::max(row);
    row.iter_mut().for_each(|x| *x = simd::exp(*x - max));
    (max, simd::sum(row, |x| x))
}

/// What the backward pass reads besides the inputs.
#[derive(Clone, Copy)]
pub struct Outputs<'a> {
    /// Output of the forward pass, `[b, sq, heads, k]`.
    pub out: Heads<'a>,
    /// Logarithm of the sum of exponentials, `[b, sq, heads]`, contiguous.
    pub lse: &'a [f32],
    /// Gradient of the output.
    pub dout: Heads<'a>,
}

/// One component of one key head: where its gradients go.
struct Gradients<'a> {
    b: usize,
    kv_head: usize,
    component: Component,
    /// Per block, per query head of the group.
    dq: Vec<MatMut<'a>>,
    dk: MatMut<'a>,
    dv: MatMut<'a>,
}

/// `(dq, dk, dv)`.
pub fn backward(inputs: &Inputs<'_>, outputs: &Outputs<'_>) -> (Vec<f32>, Vec<f32>, Vec<f32>) {
    let [batch, queries, heads, dim] = inputs.q.shape;
    let [_, keys, kv_heads, _] = inputs.k.shape;
    let blocks = inputs.blocks();
    let components: Vec<_> = blocks.iter().map(|blocks| spans::components(blocks, keys)).collect();
    let mut dq = vec![0.0; batch * queries * heads * dim];
    let mut dk = vec![0.0; batch * keys * kv_heads * dim];
    let mut dv = vec![0.0; batch * keys * kv_heads * dim];

    let mut tasks = Vec::new();
    let dq_views = by_block_and_head(&mut dq, &blocks, [queries, heads, dim]);
    let dk_views = by_component_and_head(&mut dk, &components, [keys, kv_heads, dim]);
    let dv_views = by_component_and_head(&mut dv, &components, [keys, kv_heads, dim]);
    for (b, ((dq, dk), dv)) in dq_views.into_iter().zip(dk_views).zip(dv_views).enumerate() {
        let (mut dq, mut dk, mut dv) = (dq.into_iter(), dk.into_iter(), dv.into_iter());
        for component in &components[b] {
            // The views come by block, then head; a task takes a group of heads from every block of its
            // component.
            let mut groups: Vec<Vec<MatMut<'_>>> = (0..kv_heads).map(|_| Vec::new()).collect();
            for view in 0..component.blocks.len() * heads {
                groups[view % heads / inputs.group()].extend(dq.next());
            }
            for (kv_head, dq) in groups.into_iter().enumerate() {
                let (dk, dv) = (dk.next(), dv.next());
                let (Some(dk), Some(dv)) = (dk, dv) else { continue };
                tasks.push(Gradients { b, kv_head, component: component.clone(), dq, dk, dv });
            }
        }
    }
    let work = work(&blocks, heads, 5 * 2 * dim);
    parallel::for_each(tasks, work, |task| backward_component(inputs, outputs, &blocks, task));
    (dq, dk, dv)
}

/// Views of a `[b, s, h, width]` buffer: per batch row, per component, per head.
fn by_component_and_head<'a>(
    buffer: &'a mut [f32],
    components: &[Vec<Component>],
    [rows, heads, width]: [usize; 3],
) -> Vec<Vec<MatMut<'a>>> {
    let per_batch = buffer.chunks_exact_mut((rows * heads * width).max(1));
    let views = per_batch.zip(components).map(|(buffer, components)| {
        let heights = components.iter().map(|component| component.keys.len());
        let components = MatMut::new(buffer, [rows, heads * width]).row_blocks(heights);
        components.into_iter().flat_map(|component| component.col_blocks(width)).collect()
    });
    views.collect()
}

fn backward_component(
    inputs: &Inputs<'_>,
    outputs: &Outputs<'_>,
    blocks: &[Vec<QueryBlock>],
    task: Gradients<'_>,
) {
    let Gradients { b, kv_head, component, dq, mut dk, mut dv } = task;
    let group = inputs.group();
    let mut dq = dq.into_iter();
    for block in &blocks[b][component.blocks.clone()] {
        let keys = block.keys.start.saturating_sub(component.keys.start)..;
        let keys = keys.start..keys.start + block.keys.len();
        for head in kv_head * group..(kv_head + 1) * group {
            let Some(mut dq) = dq.next() else { return };
            if block.keys.is_empty() {
                continue;
            }
            let task = Task { b, head, block: block.clone() };
            backward_block(
                inputs,
                outputs,
                &task,
                [&mut dq, &mut dk.part(keys.clone()), &mut dv.part(keys.clone())],
            );
        }
    }
}

fn backward_block(
    inputs: &Inputs<'_>,
    outputs: &Outputs<'_>,
    task: &Task,
    [dq, dk, dv]: [&mut MatMut<'_>; 3],
) {
    let Task { b, head, block } = task;
    let (rows, cols) = (block.queries.len(), block.keys.len());
    let kv_head = head / inputs.group();
    let heads = inputs.q.shape[2];
    let q = inputs.q.matrix(*b, *head, block.queries.clone());
    let k = inputs.k.matrix(*b, kv_head, block.keys.clone());
    let v = inputs.v.matrix(*b, kv_head, block.keys.clone());
    let out = outputs.out.matrix(*b, *head, block.queries.clone());
    let dout = outputs.dout.matrix(*b, *head, block.queries.clone());
    scratch::with(2 * rows * cols, |scratch| {
        let (p, ds) = scratch.split_at_mut(rows * cols);
        product(&mut MatMut::new(p, [rows, cols]), Accumulate::Fresh, inputs.scale, q, k.t());
        product(&mut MatMut::new(ds, [rows, cols]), Accumulate::Fresh, 1.0, dout, v.t());
        simd::vectorised(
            #[inline(always)]
            || {
                for (i, (p, ds)) in p.chunks_exact_mut(cols).zip(ds.chunks_exact_mut(cols)).enumerate() {
                    let lse = outputs.lse[(b * inputs.q.shape[1] + block.queries.start + i) * heads + head];
                    let delta = simd::sum2(dout.row(i), out.row(i), |dy, y| dy * y);
                    let seen = seen(inputs, *b, block, i);
                    for row in [&mut *p, &mut *ds] {
                        row[..seen.start].fill(0.0);
                        row[seen.end..].fill(0.0);
                    }
                    for (p, ds) in p[seen.clone()].iter_mut().zip(&mut ds[seen]) {
                        *p = simd::exp(*p - lse);
                        *ds = *p * (*ds - delta) * inputs.scale;
                    }
                }
            },
        );
        let (p, ds) = (Mat::new(p, [rows, cols], cols), Mat::new(ds, [rows, cols], cols));
        product(dv, Accumulate::Sum, 1.0, p.t(), dout);
        product(dq, Accumulate::Fresh, 1.0, ds, k);
        product(dk, Accumulate::Sum, 1.0, ds.t(), q);
    });
}
