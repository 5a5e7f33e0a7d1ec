//! Half of a dual-path block: a transformer block along one axis of the frames and bands of a segment.
//!
//! ```text
//! y = rms_norm(x)                                              eps 1e-5; the next product has its gain
//! x = x + W_o attention(rope(W_q y + b_q), rope(W_k y), W_v y + b_v) + b_o   along time, or along bands
//! x = x + W_2 gelu_tanh(W_1 rms_norm(x) + b_1) + b_2           4 x as wide
//! ```
//!
//! Rows are in the order segment, frame, band. Attention along bands reads them as they lie; along time it
//! reads a copy in the order segment, band, frame. Positions are rotary (arXiv 2104.09864) with base 10,000,
//! as in BS-RoFormer (arXiv 2309.02612), whose gate on the heads is left out. Keys have no bias: a softmax
//! takes out what it would add.

use burn::tensor::{Tensor, TensorData};
use coxswain_nn::{
    dense::{Dense, DenseShape},
    kernels::{AttentionMask, RowOps, Tape},
    params::{Group, ParamScope, TrainableLayout},
    recompute::Layer,
};

/// Epsilon of the norms.
const EPS: f64 = 1e-5;
/// Base of the rotary positions.
const BASE: f64 = 10_000.0;

/// How the rows of a micro-batch are arranged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BandGrid {
    /// Segments.
    pub batch: usize,
    /// Frames of a segment.
    pub frames: usize,
    /// Bands of a frame.
    pub bands: usize,
}

impl BandGrid {
    /// Frames of all segments.
    pub fn all_frames(self) -> usize {
        self.batch * self.frames
    }

    /// Rows.
    pub fn rows(self) -> usize {
        self.all_frames() * self.bands
    }
}

/// What a block attends along.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttentionAxis {
    /// The frames of a band.
    Time,
    /// The bands of a frame.
    Bands,
}

/// `x / sqrt(mean(x^2) + eps)`.
pub fn normed<T: RowOps>(x_nd: Tensor<T, 2>) -> Tensor<T, 2> {
    let ones_d = Tensor::ones([x_nd.dims()[1]], &x_nd.device());
    T::rms_norm(x_nd, ones_d, EPS)
}

/// Parameters of one.
#[derive(Clone, Debug)]
pub struct PathBlock {
    path: AttentionAxis,
    heads: usize,
    query: Dense,
    key: Dense,
    value: Dense,
    output: Dense,
    mlp_in: Dense,
    mlp_out: Dense,
}

impl PathBlock {
    /// Registers `{name}.q` and so on, `width` wide.
    pub fn register(
        layout: &mut TrainableLayout,
        group: Group,
        name: &str,
        path: AttentionAxis,
        [width, heads]: [usize; 2],
    ) -> Self {
        let mut dense = |part: &str, shape| Dense::register(layout, group, &format!("{name}.{part}"), shape);
        let square = DenseShape::xavier(width, width);
        Self {
            path,
            heads,
            query: dense("q", square),
            key: dense("k", square.without_bias()),
            value: dense("v", square),
            output: dense("o", square),
            mlp_in: dense("mlp.in", DenseShape::xavier(width, 4 * width)),
            mlp_out: dense("mlp.out", DenseShape::xavier(4 * width, width)),
        }
    }
}

/// A block in its micro-batch.
pub struct PathLayer<'a, B: Tape<Base = B>> {
    block: &'a PathBlock,
    grid: BandGrid,
    /// Cosines and sines of the positions along its path, `[1, s, k]`.
    tables: [Tensor<B, 3>; 2],
}

impl<'a, B: Tape<Base = B>> PathLayer<'a, B> {
    /// All blocks, in a micro-batch of this arrangement.
    pub fn all(blocks: &'a [PathBlock], grid: BandGrid, width: usize, device: &B::Device) -> Vec<Self> {
        let Some(first) = blocks.first() else { return Vec::new() };
        let tables = |length| rotary::<B>(length, width / first.heads, device);
        let (time, bands) = (tables(grid.frames), tables(grid.bands));
        let layer = |block: &'a PathBlock| {
            let tables = if block.path == AttentionAxis::Time { &time } else { &bands };
            Self { block, grid, tables: tables.clone() }
        };
        blocks.iter().map(layer).collect()
    }
}

/// Cosines and sines of so many positions, `[1, s, k]`, both halves of a head alike.
fn rotary<B: Tape<Base = B>>(length: usize, width: usize, device: &B::Device) -> [Tensor<B, 3>; 2] {
    let half = width / 2;
    let angle = |at: usize| {
        let (position, pair) = (at / width, at % width % half);
        position as f64 * BASE.powf(-(pair as f64) / half as f64)
    };
    [f64::cos, f64::sin].map(|f| {
        let values: Vec<f32> = (0..length * width).map(|at| f(angle(at)) as f32).collect();
        Tensor::from_data(TensorData::new(values, [1, length, width]), device)
    })
}

impl<B: Tape<Base = B>> Layer<B> for PathLayer<'_, B> {
    fn attention_half<T: Tape<Base = B>>(
        &self,
        params: &ParamScope<'_, T>,
        inputs: &[Tensor<T, 2>],
    ) -> Tensor<T, 2> {
        let (x_nd, block) = (inputs[0].clone(), self.block);
        let [rows, width] = x_nd.dims();
        let BandGrid { batch, frames, bands } = self.grid;
        // Rows in the order of two of the axes, swapped, if the path wants them so.
        let ordered = |x_nd: Tensor<T, 2>, [first, second]: [usize; 2]| match block.path {
            AttentionAxis::Bands => x_nd,
            AttentionAxis::Time => {
                let x = x_nd.reshape([batch, first, second, width]);
                x.swap_dims(1, 2).reshape([rows, width])
            }
        };
        let length = if block.path == AttentionAxis::Time { frames } else { bands };
        let by_head =
            |x_nd: Tensor<T, 2>| x_nd.reshape([rows / length, length, block.heads, width / block.heads]);
        let y_nd = ordered(normed(x_nd.clone()), [frames, bands]);
        let inputs = [&block.query, &block.key, &block.value].map(|dense| dense.apply(params, y_nd.clone()));
        let scale = 1.0 / ((width / block.heads) as f64).sqrt();
        let tables = self.tables.clone().map(T::lift);
        let mixed = T::rope_attention(inputs.map(by_head), tables, &AttentionMask::Full, scale);
        let mixed_nd = ordered(mixed.reshape([rows, width]), [bands, frames]);
        block.output.apply_residual(params, x_nd, mixed_nd)
    }

    fn mlp_half<T: Tape<Base = B>>(
        &self,
        params: &ParamScope<'_, T>,
        inputs: &[Tensor<T, 2>],
    ) -> Tensor<T, 2> {
        let x_nd = inputs[0].clone();
        let inner_nf = self.block.mlp_in.apply(params, normed(x_nd.clone()));
        self.block.mlp_out.apply_residual(params, x_nd, T::gelu_tanh(inner_nf))
    }

    fn trains(&self) -> bool {
        true
    }
}
