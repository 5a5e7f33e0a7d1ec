//! Linear layers with the weight as checkpoints store it, `[o, i]`, and their low-rank updates.
//!
//! Every output is made in panels of columns, one task each: a panel of `x w^T` reads `PANEL` rows of the weight, a panel of
//! `g w` reads `PANEL` columns. A task adds everything that belongs to its panel (bias, low-rank update) while the panel is
//! in its core's cache. A bf16 weight is converted panel by panel and never kept as f32.
//!
//! What it does not do: pack a weight ahead. The `gemm` crate reaches the same rate on `g w` as vendor libraries; on
//! `x w^T` it loses about a tenth to packing at some hundred tokens.

use std::ops::Range;

use half::bf16;

use super::{
    matrix::{self, Mat, Onto, product},
    scratch,
};

/// Columns of a task. Two vector-register tiles wide; narrower tasks lose speed, wider ones leave threads idle.
const PANEL: usize = 128;

/// Rows of a weight gradient's task: its inner dimension is the number of tokens, so it pays to be wider.
const GRADIENT_PANEL: usize = 256;

/// A weight, `[o, i]`, contiguous.
#[derive(Clone, Copy)]
pub enum Weight<'a> {
    /// Single precision.
    F32(&'a [f32]),
    /// Half precision, converted in panels.
    Bf16(&'a [bf16]),
}

/// A contiguous `[rows, cols]` matrix.
#[derive(Clone, Copy)]
pub struct Dense<'a> {
    /// The values.
    pub data: &'a [f32],
    /// Rows and columns.
    pub shape: [usize; 2],
}

impl<'a> Dense<'a> {
    /// As a view.
    pub fn mat(self) -> Mat<'a> {
        Mat::new(self.data, self.shape, self.shape[1])
    }
}

/// A low-rank update `scale * b a` of a weight.
#[derive(Clone, Copy)]
pub struct Update<'a> {
    /// `scale * x a^T` in the forward pass, `scale * g b` in the backward pass: `[n, r]`.
    pub inner_nr: Dense<'a>,
    /// What the inner matrix is multiplied with: `b` `[o, r]` transposed, or `a` `[r, i]`.
    pub outer_rc: Mat<'a>,
}

/// `x w^T + bias (+ update)`, `[n, o]`.
pub fn forward(
    x_ni: Dense<'_>,
    w_oi: Weight<'_>,
    bias_o: Option<&[f32]>,
    update: Option<Update<'_>>,
) -> Vec<f32> {
    let [tokens, inputs] = x_ni.shape;
    let outputs = w_oi.len() / inputs.max(1);
    matrix::build([tokens, outputs], PANEL, |panel, out| {
        w_oi.rows(panel.clone(), inputs, |w| {
            let x_by_w = |out: &mut matrix::MatMut<'_>| product(out, Onto::Sum, 1.0, x_ni.mat(), w.t());
            match (bias_o, update) {
                (None, None) => out.product(1.0, x_ni.mat(), w.t()),
                (Some(bias_o), None) => {
                    let mut out = out.repeated(&bias_o[panel.clone()]);
                    x_by_w(&mut out);
                    out
                }
                (None, Some(update)) => {
                    let mut out =
                        out.product(1.0, update.inner_nr.mat(), update.outer_rc.cols(panel.clone()));
                    x_by_w(&mut out);
                    out
                }
                (Some(bias_o), Some(update)) => {
                    let mut out = out.repeated(&bias_o[panel.clone()]);
                    product(
                        &mut out,
                        Onto::Sum,
                        1.0,
                        update.inner_nr.mat(),
                        update.outer_rc.cols(panel.clone()),
                    );
                    x_by_w(&mut out);
                    out
                }
            }
        })
    })
}

/// `g w (+ update)`, `[n, i]`: the gradient of the input.
pub fn input_gradient(g_no: Dense<'_>, w_oi: Weight<'_>, update: Option<Update<'_>>) -> Vec<f32> {
    let [tokens, outputs] = g_no.shape;
    let inputs = w_oi.len() / outputs.max(1);
    matrix::build([tokens, inputs], PANEL, |panel, out| {
        w_oi.cols(panel.clone(), [outputs, inputs], |w| match update {
            None => out.product(1.0, g_no.mat(), w),
            Some(update) => {
                let mut out = out.product(1.0, update.inner_nr.mat(), update.outer_rc.cols(panel.clone()));
                product(&mut out, Onto::Sum, 1.0, g_no.mat(), w);
                out
            }
        })
    })
}

/// `g^T x`, `[o, i]`: the gradient of a weight.
pub fn weight_gradient(g_no: Dense<'_>, x_ni: Dense<'_>) -> Vec<f32> {
    let shape = [g_no.shape[1], x_ni.shape[1]];
    matrix::build(shape, GRADIENT_PANEL, |panel, out| {
        out.product(1.0, g_no.mat().t(), x_ni.mat().cols(panel))
    })
}

/// `scale * x a^T`, `[n, r]`, for a narrow `a` `[r, i]`.
pub fn down(x_ni: Dense<'_>, a_ri: Dense<'_>, scale: f32) -> Vec<f32> {
    by_rows(x_ni.shape[0], a_ri.shape[0], |rows, mut out| {
        product(&mut out, Onto::Fresh, scale, x_ni.mat().rows(rows), a_ri.mat().t());
    })
}

/// `scale * g b`, `[n, r]`, for a narrow `b` `[o, r]`.
pub fn up_transposed(g_no: Dense<'_>, b_or: Dense<'_>, scale: f32) -> Vec<f32> {
    by_rows(g_no.shape[0], b_or.shape[1], |rows, mut out| {
        product(&mut out, Onto::Fresh, scale, g_no.mat().rows(rows), b_or.mat());
    })
}

/// Column sums, `[o]`: the gradient of a bias.
pub fn column_sums(g_no: Dense<'_>) -> Vec<f32> {
    let [tokens, outputs] = g_no.shape;
    matrix::build([1, outputs], PANEL, |panel, out| {
        let mut out = out.filled(0.0);
        for n in 0..tokens {
            let g = &g_no.data[n * outputs..][panel.clone()];
            out.row(0).iter_mut().zip(g).for_each(|(sum, g)| *sum += g);
        }
        out
    })
}

/// Rows of a task of [`by_rows`].
const ROWS: usize = 64;

/// A narrow buffer, made in blocks of rows on all threads.
fn by_rows(rows: usize, width: usize, write: impl Fn(Range<usize>, matrix::MatMut<'_>) + Sync) -> Vec<f32> {
    use rayon::prelude::*;

    let mut buffer = vec![0.0; rows * width];
    buffer.par_chunks_mut((ROWS * width).max(1)).enumerate().for_each(|(i, block)| {
        let count = block.len() / width;
        write(i * ROWS..i * ROWS + count, matrix::MatMut::new(block, [count, width]));
    });
    buffer
}

impl Weight<'_> {
    fn len(&self) -> usize {
        match self {
            Self::F32(values) => values.len(),
            Self::Bf16(values) => values.len(),
        }
    }

    /// Lends the given rows as f32.
    fn rows<R>(&self, range: Range<usize>, inputs: usize, op: impl FnOnce(Mat<'_>) -> R) -> R {
        let shape = [range.len(), inputs];
        let range = range.start * inputs..range.end * inputs;
        match self {
            Self::F32(values) => op(Mat::new(&values[range], shape, inputs)),
            Self::Bf16(values) => scratch::with(range.len(), |scratch| {
                convert(&values[range], scratch);
                op(Mat::new(scratch, shape, inputs))
            }),
        }
    }

    /// Lends the given columns as f32.
    fn cols<R>(
        &self,
        range: Range<usize>,
        [outputs, inputs]: [usize; 2],
        op: impl FnOnce(Mat<'_>) -> R,
    ) -> R {
        match self {
            Self::F32(values) => op(Mat::new(values, [outputs, inputs], inputs).cols(range)),
            Self::Bf16(values) => scratch::with(outputs * range.len(), |scratch| {
                let rows =
                    values.chunks_exact(inputs.max(1)).zip(scratch.chunks_exact_mut(range.len().max(1)));
                rows.for_each(|(from, to)| convert(&from[range.clone()], to));
                op(Mat::new(scratch, [outputs, range.len()], range.len()))
            }),
        }
    }
}

fn convert(from: &[bf16], to: &mut [f32]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to = f32::from_bits(u32::from(from.to_bits()) << 16);
    }
}
