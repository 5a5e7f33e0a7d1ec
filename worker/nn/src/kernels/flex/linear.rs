//! Linear layers with the weight as checkpoints store it, `[o, i]`, and their low-rank updates.
//!
//! Every output is made in panels of columns, one task each: a panel of `x w^T` reads `PANEL` rows of the
//! weight, a panel of `g w` reads `PANEL` columns. A task adds everything that belongs to its panel (bias,
//! then low-rank update) while the panel is in its core's cache, always after the product and in this order.
//! A weight in bf16, or of few bits, is converted panel by panel and never kept as f32; one in bf16 is not
//! converted at all where the processor multiplies it as it is ([`bfloat16_product`]).
//!
//! The `gemm` crate is as fast as vendor libraries where the operand it reads by vectors, here the weight, is
//! contiguous along the output's columns. In `g w` it is. In `x w^T` it is not, and the crate would gather it
//! element by element: a tenth of the time at some hundred tokens, half of it at thirty. So a panel of the
//! weight is transposed by registers first; and for few tokens the product is turned around (`w x^T`, the
//! small output transposed), which reads the weight as it is. Panels are as wide as the crate's tile, or as
//! high as it reads the other factor in place, so that it copies neither.

use std::ops::Range;

use half::bf16;

use super::{
    bfloat16_product::{self, LeftFactor, RightFactor},
    matrix::{self, Accumulate, Mat, MatMut, product},
    parallel::{self, Work},
    scratch, simd,
};
use crate::{
    bfloat16::widen,
    kernels::{GradientSlot, dropout::Mask, precision, quantized::QuantizedMatrix},
};

/// Columns of a task: the width of the `gemm` crate's tile with the widest registers, and some tenths of a
/// millisecond.
pub const PANEL: usize = bfloat16_product::WIDTH;

/// Rows of the weight that a task of the product turned around reads, and rows of a weight gradient's task.
const ROW_PANEL: usize = matrix::UNCOPIED;

/// Tokens up to which turning the product around is faster than transposing the weight.
pub const FEW: usize = 64;

/// Rows of a weight gradient's task: its inner dimension is the number of tokens, so it pays to be wider.
const GRADIENT_PANEL: usize = 256;

/// Rows, and columns, of an input that a thread holds without what is dropped of it.
pub const DROPOUT_BLOCK: [usize; 2] = [ROWS, GRADIENT_PANEL];

/// A weight, `[o, i]`, contiguous.
#[derive(Clone, Copy)]
pub enum WeightView<'a> {
    /// Single precision.
    F32(&'a [f32]),
    /// Half precision, multiplied as it is, or converted in panels.
    Bf16(&'a [bf16]),
    /// Few bits, converted in panels.
    Quantized(&'a QuantizedMatrix),
}

/// A contiguous `[rows, cols]` matrix.
#[derive(Clone, Copy)]
pub struct DenseView<'a> {
    /// The values.
    pub data: &'a [f32],
    /// Rows and columns.
    pub shape: [usize; 2],
}

impl<'a> DenseView<'a> {
    /// As a view.
    pub fn mat(self) -> Mat<'a> {
        Mat::new(self.data, self.shape, self.shape[1])
    }
}

/// A low-rank update `scale * b a` of a weight.
#[derive(Clone, Copy)]
pub struct Update<'a> {
    /// `scale * x a^T` in the forward pass, `scale * g b` in the backward pass: `[n, r]`.
    pub inner_nr: DenseView<'a>,
    /// What the inner matrix is multiplied with: `b` `[o, r]` transposed, or `a` `[r, i]`.
    pub outer_rc: Mat<'a>,
    /// What is dropped of their product.
    pub mask: Option<Mask<'a>>,
}

/// `x w^T + bias (+ update)`, `[n, o]`. A row depends on its row of `x` alone, whichever way the product is
/// computed.
pub fn forward(
    x_ni: DenseView<'_>,
    w_oi: WeightView<'_>,
    bias_o: Option<&[f32]>,
    update: Option<Update<'_>>,
) -> Vec<f32> {
    let [tokens, inputs] = x_ni.shape;
    let outputs = w_oi.len() / inputs.max(1);
    let halves =
        w_oi.halves(inputs).map(|w| (LeftFactor::rounded(x_ni.data, x_ni.shape), RightFactor::Transposed(w)));
    let few = tokens <= FEW && halves.is_none();
    // Columns beyond the tokens are zeros: with them rows are whole registers.
    let columns = tokens.next_multiple_of(matrix::REGISTER);
    let x_in = if few { transposed(x_ni, columns) } else { Vec::new() };
    let width = if few { ROW_PANEL } else { PANEL };
    matrix::build([tokens, outputs], width, work(tokens, w_oi.len()), |panel, out| {
        let mut out = if let Some((x, w)) = &halves {
            x.product(*w, panel.clone(), out)
        } else if few {
            w_oi.with_rows(panel.clone(), inputs, columns, |w_pi, y_pn| {
                let x_in = Mat::new(&x_in, [inputs, columns], columns);
                product(&mut MatMut::new(y_pn, [panel.len(), columns]), Accumulate::Fresh, 1.0, w_pi, x_in);
                out.transposed(y_pn, columns)
            })
        } else {
            w_oi.with_rows_transposed(panel.clone(), inputs, |w_ip| out.panel_product(x_ni.mat(), w_ip))
        };
        add_bias(&mut out, bias_o.map(|bias| &bias[panel.clone()]));
        add_update(&mut out, panel, update);
        out
    })
}

fn add_bias(out: &mut MatMut<'_>, bias: Option<&[f32]>) {
    let Some(bias) = bias else { return };
    for n in 0..out.shape()[0] {
        out.row(n).iter_mut().zip(bias).for_each(|(y, b)| *y += b);
    }
}

fn add_update(out: &mut MatMut<'_>, panel: Range<usize>, update: Option<Update<'_>>) {
    let Some(Update { inner_nr, outer_rc, mask }) = update else { return };
    let Some(mask) = mask else {
        return product(out, Accumulate::Sum, 1.0, inner_nr.mat(), outer_rc.cols(panel));
    };
    let shape @ [tokens, width] = out.shape();
    scratch::with(tokens * width, |low| {
        product(
            &mut MatMut::new(low, shape),
            Accumulate::Fresh,
            1.0,
            inner_nr.mat(),
            outer_rc.cols(panel.clone()),
        );
        for (n, low) in low.chunks_exact(width.max(1)).enumerate() {
            let (mask, out) = (mask.row(n), out.row(n));
            simd::vectorised(
                #[inline(always)]
                || {
                    for ((y, &low), column) in out.iter_mut().zip(low).zip(panel.start as u32..) {
                        *y += low * mask.factor(column);
                    }
                },
            );
        }
    });
}

/// Rows and columns of an input with what is dropped of it zero, written to `to`.
fn masked(x_ni: DenseView<'_>, mask: Mask<'_>, rows: Range<usize>, columns: Range<usize>, to: &mut [f32]) {
    for (n, to) in rows.zip(to.chunks_exact_mut(columns.len().max(1))) {
        to.copy_from_slice(&x_ni.data[n * x_ni.shape[1]..][columns.clone()]);
        let mask = mask.row(n);
        simd::vectorised(
            #[inline(always)]
            || mask.apply(columns.start, to),
        );
    }
}

/// The transpose, with zeros behind its rows until they have `columns` values.
fn transposed(x: DenseView<'_>, columns: usize) -> Vec<f32> {
    let mut out = vec![0.0; x.shape[1] * columns];
    simd::transpose(x.data, x.shape, x.shape[1], &mut out, columns);
    out
}

/// `g w (+ update)`, `[n, i]`: the gradient of the input.
pub fn input_gradient(g_no: DenseView<'_>, w_oi: WeightView<'_>, update: Option<Update<'_>>) -> Vec<f32> {
    let [tokens, outputs] = g_no.shape;
    let inputs = w_oi.len() / outputs.max(1);
    let halves = w_oi
        .halves(outputs)
        .map(|w| (LeftFactor::rounded(g_no.data, g_no.shape), RightFactor::Plain(w, inputs)));
    matrix::build([tokens, inputs], PANEL, work(tokens, w_oi.len()), |panel, out| {
        let mut out = match (&halves, w_oi) {
            (Some((g, w)), _) => g.product(*w, panel.clone(), out),
            // A copy pays when it is read many times.
            (None, WeightView::F32(w)) if tokens <= FEW => {
                out.panel_product(g_no.mat(), Mat::new(w, [outputs, inputs], inputs).cols(panel.clone()))
            }
            _ => w_oi.with_cols(panel.clone(), [outputs, inputs], |w| out.panel_product(g_no.mat(), w)),
        };
        add_update(&mut out, panel, update);
        out
    })
}

/// `g^T x`, `[o, i]`: the gradient of a weight.
pub fn weight_gradient(g_no: DenseView<'_>, x_ni: DenseView<'_>) -> Vec<f32> {
    let shape = [g_no.shape[1], x_ni.shape[1]];
    matrix::build(shape, GRADIENT_PANEL, work(g_no.shape[0], shape[0] * shape[1]), |panel, out| {
        out.product(1.0, g_no.mat().t(), x_ni.mat().cols(panel))
    })
}

/// [`weight_gradient`] of what a mask leaves of `x`.
pub fn masked_weight_gradient(g_no: DenseView<'_>, x_ni: DenseView<'_>, mask: Mask<'_>) -> Vec<f32> {
    let (shape, tokens) = ([g_no.shape[1], x_ni.shape[1]], g_no.shape[0]);
    matrix::build(shape, GRADIENT_PANEL, work(tokens, shape[0] * shape[1]), |panel, out| {
        let width = panel.len();
        scratch::with(tokens * width, |kept| {
            masked(x_ni, mask, 0..tokens, panel, kept);
            out.product(1.0, g_no.mat().t(), Mat::new(kept, [tokens, width], width))
        })
    })
}

/// `g^T x` added to `sum`, `[o, i]`.
pub fn add_weight_gradient(g_no: DenseView<'_>, x_ni: DenseView<'_>, sum: GradientSlot<'_>) {
    let [outputs, inputs] = [g_no.shape[1], x_ni.shape[1]];
    let accumulate = if sum.stale { Accumulate::Fresh } else { Accumulate::Sum };
    let rows = ROW_PANEL.min(outputs.max(1));
    let blocks = sum.values.chunks_mut((rows * inputs).max(1)).enumerate().collect();
    let work = work(g_no.shape[0], outputs * inputs);
    parallel::for_each(blocks, work, |(i, block): (usize, &mut [f32])| {
        let height = block.len() / inputs;
        let g = g_no.mat().cols(i * rows..i * rows + height);
        product(&mut MatMut::new(block, [height, inputs]), accumulate, 1.0, g.t(), x_ni.mat());
    });
}

/// `scale * x a^T`, `[n, r]`, for a narrow `a` `[r, i]`.
pub fn down(x_ni: DenseView<'_>, a_ri: DenseView<'_>, scale: f32) -> Vec<f32> {
    let work = work(x_ni.shape[0], a_ri.data.len());
    by_rows(x_ni.shape[0], a_ri.shape[0], work, |rows, mut out| {
        product(&mut out, Accumulate::Fresh, scale, x_ni.mat().rows(rows), a_ri.mat().t());
    })
}

/// [`down`] of what a mask leaves of `x`.
pub fn masked_down(x_ni: DenseView<'_>, mask: Mask<'_>, a_ri: DenseView<'_>, scale: f32) -> Vec<f32> {
    let (work, inputs) = (work(x_ni.shape[0], a_ri.data.len()), x_ni.shape[1]);
    by_rows(x_ni.shape[0], a_ri.shape[0], work, |rows, mut out| {
        let shape = [rows.len(), inputs];
        scratch::with(rows.len() * inputs, |kept| {
            masked(x_ni, mask, rows, 0..inputs, kept);
            product(&mut out, Accumulate::Fresh, scale, Mat::new(kept, shape, inputs), a_ri.mat().t());
        });
    })
}

/// `scale * g b`, `[n, r]`, for a narrow `b` `[o, r]`.
pub fn up_transposed(g_no: DenseView<'_>, b_or: DenseView<'_>, scale: f32) -> Vec<f32> {
    let work = work(g_no.shape[0], b_or.data.len());
    by_rows(g_no.shape[0], b_or.shape[1], work, |rows, mut out| {
        product(&mut out, Accumulate::Fresh, scale, g_no.mat().rows(rows), b_or.mat());
    })
}

/// Column sums, `[o]`: the gradient of a bias.
pub fn column_sums(g_no: DenseView<'_>) -> Vec<f32> {
    let [tokens, outputs] = g_no.shape;
    matrix::build([1, outputs], PANEL, Work::values(g_no.data.len()), |panel, out| {
        let mut out = out.filled(0.0);
        for n in 0..tokens {
            let g = &g_no.data[n * outputs..][panel.clone()];
            out.row(0).iter_mut().zip(g).for_each(|(sum, g)| *sum += g);
        }
        out
    })
}

/// The work of the product of a `[n, i]` and a weight: its multiplications and additions, or, of a few
/// tokens, reading the weight.
fn work(tokens: usize, weights: usize) -> Work {
    Work::products(2 * tokens * weights).max(Work::streamed(4 * weights))
}

/// Rows of a task of [`by_rows`].
const ROWS: usize = 64;

/// A narrow buffer, made in blocks of rows on all threads.
fn by_rows(
    rows: usize,
    width: usize,
    work: Work,
    write: impl Fn(Range<usize>, MatMut<'_>) + Sync,
) -> Vec<f32> {
    let mut buffer = vec![0.0; rows * width];
    let blocks = buffer.chunks_mut((ROWS * width).max(1)).enumerate().collect();
    parallel::for_each(blocks, work, |(i, block): (usize, &mut [f32])| {
        let count = block.len() / width;
        write(i * ROWS..i * ROWS + count, MatMut::new(block, [count, width]));
    });
    buffer
}

impl<'a> WeightView<'a> {
    /// The values, if they are multiplied as they are over an inner dimension of `depth`.
    fn halves(&self, depth: usize) -> Option<&'a [bf16]> {
        match self {
            Self::Bf16(values) if precision::multiplies_bfloat16(depth) => Some(values),
            _ => None,
        }
    }

    fn len(&self) -> usize {
        match self {
            Self::F32(values) => values.len(),
            Self::Bf16(values) => values.len(),
            Self::Quantized(matrix) => matrix.shape().iter().product(),
        }
    }

    /// Lends the given rows as f32, and a buffer of as many rows of `width`.
    fn with_rows<R>(
        &self,
        range: Range<usize>,
        inputs: usize,
        width: usize,
        op: impl FnOnce(Mat<'_>, &mut [f32]) -> R,
    ) -> R {
        let shape = [range.len(), inputs];
        let values = range.start * inputs..range.end * inputs;
        match self {
            Self::F32(w) => {
                scratch::with(range.len() * width, |buffer| op(Mat::new(&w[values], shape, inputs), buffer))
            }
            _ => scratch::with(values.len() + range.len() * width, |scratch| {
                let (rows, buffer) = scratch.split_at_mut(values.len());
                self.widen(values.start, rows);
                op(Mat::new(rows, shape, inputs), buffer)
            }),
        }
    }

    /// Values from `first` on as f32.
    fn widen(&self, first: usize, to: &mut [f32]) {
        let last = first + to.len();
        match self {
            Self::F32(w) => to.copy_from_slice(&w[first..last]),
            Self::Bf16(w) => to.iter_mut().zip(&w[first..last]).for_each(|(to, from)| *to = widen(*from)),
            Self::Quantized(matrix) => matrix.dequantize(first, to),
        }
    }

    /// Lends the transpose of the given rows, `[i, rows]`, as f32.
    fn with_rows_transposed<R>(
        &self,
        range: Range<usize>,
        inputs: usize,
        op: impl FnOnce(Mat<'_>) -> R,
    ) -> R {
        let width = range.len();
        self.with_rows(range, inputs, inputs, |rows, buffer| {
            simd::transpose(rows.data(), [width, inputs], inputs, buffer, width);
            op(Mat::new(buffer, [inputs, width], width))
        })
    }

    /// Lends a copy of the given columns, contiguous, as f32.
    fn with_cols<R>(
        &self,
        range: Range<usize>,
        [outputs, inputs]: [usize; 2],
        op: impl FnOnce(Mat<'_>) -> R,
    ) -> R {
        let width = range.len();
        scratch::with(outputs * width, |scratch| {
            for (o, row) in scratch.chunks_exact_mut(width.max(1)).enumerate() {
                self.widen(o * inputs + range.start, row);
            }
            op(Mat::new(scratch, [outputs, width], width))
        })
    }
}
