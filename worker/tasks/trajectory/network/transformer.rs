//! A transformer whose tokens are the layers of a trajectory: it learns what one layer makes of another.
//!
//! ```text
//! encoder   each layer's values ─ embed ─ + place ─▶ blocks ─▶ norm, all tokens at once ─ code ─▶ [n, z]
//! decoder   [n, z] ─ embed to a token for each layer ─ + place ─▶ blocks ─▶ norm ─ values of each layer
//!
//! block     x = x + W_o attention(W_q y, W_k y, W_v y) + b_o     y = layer_norm(x), eps 1e-5, without gain
//!           x = x + W_2 gelu_tanh(W_1 layer_norm(x))             4 x as wide; all but W_k have biases
//! ```
//!
//! Keys have no bias: it would move all scores of a query alike, which the softmax takes out again.

use burn::tensor::Tensor;
use coxswain_nn::{
    dense::{Dense, DenseShape},
    kernels::{AttentionMask, AttentionOps, RowOps, Tape},
    params::{ParamId, ParamScope},
    recompute::{Layer, segment::Segment},
};

use super::registrar::NetworkRegistrar;
use crate::trajectory::{config::NetworkSettings, extractor::TrajectoryShape};

/// Epsilon of the layer norms.
const EPS: f64 = 1e-5;

/// Sizes of a half.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    /// Tokens: layers of a trajectory.
    tokens: usize,
    /// Values of a layer.
    dim: usize,
    hidden: usize,
    heads: usize,
    blocks: usize,
}

impl Shape {
    pub fn from_settings(settings: &NetworkSettings, trajectory: &TrajectoryShape) -> Self {
        let NetworkSettings { hidden_dim: hidden, heads, num_layers: blocks, .. } = *settings;
        Self { tokens: trajectory.layers.len(), dim: trajectory.dim, hidden, heads, blocks }
    }
}

/// Encoder or decoder.
#[derive(Clone, Debug)]
pub struct TransformerHalf {
    /// To tokens.
    pub first: Embed,
    /// Between tokens.
    pub blocks: Vec<TokenBlock>,
    /// From tokens.
    pub last: Output,
}

impl TransformerHalf {
    /// Registers the half from trajectories to codes.
    pub(super) fn encoder(registrar: &mut NetworkRegistrar<'_>, of: Shape, code: usize) -> Self {
        Self {
            first: Embed::register(registrar, "encoder", of, [of.dim, of.hidden]),
            blocks: blocks(registrar, "encoder", of),
            last: Output::register(registrar, "encoder", of, [of.tokens * of.hidden, code]),
        }
    }

    /// Registers the half from latents to trajectories.
    pub(super) fn decoder(registrar: &mut NetworkRegistrar<'_>, of: Shape, latent: usize) -> Self {
        Self {
            first: Embed::register(registrar, "decoder", of, [latent, of.tokens * of.hidden]),
            blocks: blocks(registrar, "decoder", of),
            last: Output::register(registrar, "decoder", of, [of.hidden, of.dim]),
        }
    }

    /// Whether anything of it trains.
    pub fn trains(&self) -> bool {
        self.first.trains() || self.blocks.iter().any(TokenBlock::any_trains) || self.last.out.trains()
    }
}

fn blocks(registrar: &mut NetworkRegistrar<'_>, half: &str, of: Shape) -> Vec<TokenBlock> {
    (0..of.blocks).map(|index| TokenBlock::register(registrar, half, of, index)).collect()
}

/// From rows to tokens, each with what stands for its place.
#[derive(Clone, Copy, Debug)]
pub struct Embed {
    embed: Dense,
    /// Values that it reads of a row, or of a token of it.
    from: usize,
    places: ParamId,
    of: Shape,
}

impl Embed {
    fn register(registrar: &mut NetworkRegistrar<'_>, half: &str, of: Shape, [from, to]: [usize; 2]) -> Self {
        let embed = registrar.dense(&format!("{half}.embed"), DenseShape::xavier(from, to));
        let places = registrar.table(&format!("{half}.places"), [of.tokens, of.hidden]);
        Self { embed, from, places, of }
    }

    /// Whether anything of it trains.
    pub fn trains(&self) -> bool {
        self.embed.trains() || matches!(self.places, ParamId::Trained(_))
    }
}

impl<B: Tape<Base = B>> Segment<B> for Embed {
    fn run<T: Tape<Base = B>>(&self, params: &ParamScope<'_, T>, inputs: &[Tensor<T, 2>]) -> Tensor<T, 2> {
        let Shape { tokens, hidden, .. } = self.of;
        let [rows, width] = inputs[0].dims();
        // A trajectory is read token by token; a latent becomes all of them at once.
        let x_mi = inputs[0].clone().reshape([rows * width / self.from, self.from]);
        let y_nth = self.embed.apply(params, x_mi).reshape([rows, tokens, hidden]);
        let places_th = params.get::<2>(self.places);
        (y_nth + places_th.unsqueeze::<3>()).reshape([rows * tokens, hidden])
    }
}

/// From tokens to rows.
#[derive(Clone, Copy, Debug)]
pub struct Output {
    out: Dense,
    /// Values that it reads: of all tokens of a row, or of one.
    from: usize,
    tokens: usize,
}

impl Output {
    fn register(registrar: &mut NetworkRegistrar<'_>, half: &str, of: Shape, [from, to]: [usize; 2]) -> Self {
        let out = registrar.dense(&format!("{half}.out"), DenseShape::xavier(from, to));
        Self { out, from, tokens: of.tokens }
    }
}

impl<B: Tape<Base = B>> Segment<B> for Output {
    fn run<T: Tape<Base = B>>(&self, params: &ParamScope<'_, T>, inputs: &[Tensor<T, 2>]) -> Tensor<T, 2> {
        let [n, hidden] = inputs[0].dims();
        let y_nd = <T as RowOps>::layer_norm(inputs[0].clone(), EPS);
        let y_mo = self.out.apply(params, y_nd.reshape([n * hidden / self.from, self.from]));
        let ([m, to], rows) = (y_mo.dims(), n / self.tokens);
        y_mo.reshape([rows, m * to / rows])
    }
}

/// One block.
#[derive(Clone, Copy, Debug)]
pub struct TokenBlock {
    of: Shape,
    query: Dense,
    key: Dense,
    value: Dense,
    output: Dense,
    mlp_in: Dense,
    mlp_out: Dense,
}

impl TokenBlock {
    fn register(registrar: &mut NetworkRegistrar<'_>, half: &str, of: Shape, index: usize) -> Self {
        let h = of.hidden;
        let mut dense = |name: &str, shape| registrar.dense(&format!("{half}.blocks.{index}.{name}"), shape);
        Self {
            of,
            query: dense("attn.q", DenseShape::xavier(h, h)),
            key: dense("attn.k", DenseShape::xavier(h, h).without_bias()),
            value: dense("attn.v", DenseShape::xavier(h, h)),
            output: dense("attn.o", DenseShape::xavier(h, h)),
            mlp_in: dense("mlp.in", DenseShape::xavier(h, 4 * h)),
            mlp_out: dense("mlp.out", DenseShape::xavier(4 * h, h)),
        }
    }

    fn any_trains(&self) -> bool {
        let Self { query, key, value, output, mlp_in, mlp_out, .. } = self;
        [query, key, value, output, mlp_in, mlp_out].into_iter().any(Dense::trains)
    }
}

impl<B: Tape<Base = B>> Layer<B> for TokenBlock {
    fn attention_half<T: Tape<Base = B>>(
        &self,
        params: &ParamScope<'_, T>,
        inputs: &[Tensor<T, 2>],
    ) -> Tensor<T, 2> {
        let Shape { tokens, hidden, heads, .. } = self.of;
        let x_nd = inputs[0].clone();
        let (rows, k) = (x_nd.dims()[0] / tokens, hidden / heads);
        let y_nd = <T as RowOps>::layer_norm(x_nd.clone(), EPS);
        let [q, k_, v] = [&self.query, &self.key, &self.value]
            .map(|part| part.apply(params, y_nd.clone()).reshape([rows, tokens, heads, k]));
        let out = <T as AttentionOps>::attention(q, k_, v, &AttentionMask::Full, (k as f64).powf(-0.5));
        self.output.apply_residual(params, x_nd, out.reshape([rows * tokens, hidden]))
    }

    fn mlp_half<T: Tape<Base = B>>(
        &self,
        params: &ParamScope<'_, T>,
        inputs: &[Tensor<T, 2>],
    ) -> Tensor<T, 2> {
        let x_nd = inputs[0].clone();
        let y_nf = self.mlp_in.apply(params, <T as RowOps>::layer_norm(x_nd.clone(), EPS));
        self.mlp_out.apply_residual(params, x_nd, T::gelu_tanh(y_nf))
    }

    fn trains(&self) -> bool {
        self.any_trains()
    }
}
