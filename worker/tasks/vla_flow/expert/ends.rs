//! The expert's two ends: what turns state, sensors, noisy actions and flow time into tokens and a condition,
//! and what turns tokens back into a velocity.

use std::sync::Arc;

use burn::tensor::{Tensor, TensorData, backend::Backend};

use coxswain_nn::{
    dense::{Dense, DenseShape},
    kernels::{AdaNorm, Tape},
    params::{Init, ParamId, ParamScope},
    recompute::segment::Segment,
};

use super::{ExpertShape, block::Rows, registrar::Registrar};

/// Width of the sinusoidal time embedding.
pub(crate) const TIME_WIDTH: usize = 256;
/// Of the last layer norm.
const EPS: f64 = 1e-6;
/// Standard deviation of positions and of the time embedding's layers, as DiT has it.
const SMALL: f32 = 0.02;

/// `[cos | sin]` of `1000 t` at 128 frequencies from 1 to 1e-4, as diffusers' `Timesteps(256,
/// flip_sin_to_cos=True, downscale_freq_shift=1)` makes them. `times` `[m]`; returns `[m, 256]`.
pub(super) fn sinusoids<B: Backend>(times: &[f32], device: &B::Device) -> Tensor<B, 2> {
    let half = TIME_WIDTH / 2;
    let mut table = vec![0.0f32; times.len() * TIME_WIDTH];
    for (row, &t) in table.chunks_exact_mut(TIME_WIDTH).zip(times) {
        for i in 0..half {
            let frequency = (-(10_000f64.ln()) * i as f64 / (half - 1) as f64).exp();
            let (sin, cos) = (1000.0 * f64::from(t) * frequency).sin_cos();
            row[i] = cos as f32;
            row[half + i] = sin as f32;
        }
    }
    Tensor::from_data(TensorData::new(table, [times.len(), TIME_WIDTH]), device)
}

/// Flow time to the condition that all blocks share: `silu(W_2 silu(W_1 sinusoids(t)))`. The outer `silu`
/// belongs to the blocks' AdaLN in other implementations; taken out of them, it is computed once.
#[derive(Clone, Debug)]
pub(super) struct TimeEmbedding {
    first: Dense,
    second: Dense,
}

impl TimeEmbedding {
    pub fn register(registrar: &mut Registrar<'_>, shape: &ExpertShape) -> Self {
        let mut dense = |name, shape: DenseShape| registrar.dense(name, shape.normal(SMALL));
        Self {
            first: dense("time.in", DenseShape::xavier(TIME_WIDTH, shape.width)),
            second: dense("time.out", DenseShape::xavier(shape.width, shape.width)),
        }
    }

    /// Whether anything of it trains.
    pub fn trains(&self) -> bool {
        self.first.trains() || self.second.trains()
    }
}

/// The time embedding of one micro-batch, as a segment without inputs.
pub(super) struct TimeSegment<'a, B: Tape<Base = B>> {
    pub embedding: &'a TimeEmbedding,
    /// `[b * r, 256]`.
    pub sinusoids_mf: Tensor<B, 2>,
}

impl<B: Tape<Base = B>> Segment<B> for TimeSegment<'_, B> {
    fn run<T: Tape<Base = B>>(&self, params: &ParamScope<'_, T>, _inputs: &[Tensor<T, 2>]) -> Tensor<T, 2> {
        use burn::tensor::activation::silu;
        let h_md = self.embedding.first.apply(params, T::lift(self.sinusoids_mf.clone()));
        silu(self.embedding.second.apply(params, silu(h_md)))
    }
}

/// State and action projections and the learned positions.
#[derive(Clone, Debug)]
pub(super) struct TokenEmbedding {
    state: Dense,
    action: Dense,
    positions: ParamId,
}

impl TokenEmbedding {
    pub fn register(registrar: &mut Registrar<'_>, shape: &ExpertShape) -> Self {
        let mut dense = |name, inputs| registrar.dense(name, DenseShape::xavier(inputs, shape.width));
        let (state, action) = (dense("state", shape.state), dense("action", shape.action));
        let positions =
            registrar.tensor("positions", &[shape.tokens(), shape.width], Init::Normal(SMALL));
        Self { state, action, positions }
    }

    /// Whether anything of it trains.
    pub fn trains(&self) -> bool {
        let positions = matches!(self.positions, ParamId::Trained(_));
        self.state.trains() || self.action.trains() || positions
    }
}

/// Token embedding of one micro-batch. Its only input, if any, is the sensor tokens `[b * sensor_tokens, d]`.
pub(super) struct TokenSegment<'a, B: Tape<Base = B>> {
    pub embedding: &'a TokenEmbedding,
    pub rows: Arc<Rows>,
    /// `[b, state]`.
    pub state_bc: Tensor<B, 2>,
    /// `[b * r * horizon, action]`.
    pub noisy_nc: Tensor<B, 2>,
}

impl<B: Tape<Base = B>> Segment<B> for TokenSegment<'_, B> {
    fn run<T: Tape<Base = B>>(&self, params: &ParamScope<'_, T>, inputs: &[Tensor<T, 2>]) -> Tensor<T, 2> {
        let Rows { batch, repeats, tokens, .. } = *self.rows;
        let state_bd = self.embedding.state.apply(params, T::lift(self.state_bc.clone()));
        let action_nd = self.embedding.action.apply(params, T::lift(self.noisy_nc.clone()));
        let width = action_nd.dims()[1];
        // State and sensors are the same in every repeat.
        let spread = |x_nd: Tensor<T, 2>| {
            let length = x_nd.dims()[0] / batch;
            x_nd.reshape([batch, 1, length, width]).expand([batch, repeats, length, width])
        };
        let horizon = action_nd.dims()[0] / (batch * repeats);
        let mut parts = vec![spread(state_bd)];
        parts.extend(inputs.iter().cloned().map(spread));
        parts.push(action_nd.reshape([batch, repeats, horizon, width]));
        let positions_td = params.get::<2>(self.embedding.positions);
        let x_brtd = Tensor::cat(parts, 2) + positions_td.reshape([1, 1, tokens, width]);
        x_brtd.reshape([batch * repeats * tokens, width])
    }
}

/// Final AdaLN and projection to actions.
#[derive(Clone, Debug)]
pub(super) struct Head {
    ada: Dense,
    output: Dense,
}

impl Head {
    pub fn register(registrar: &mut Registrar<'_>, shape: &ExpertShape) -> Self {
        let mut dense = |name, outputs| registrar.dense(name, DenseShape::zeros(shape.width, outputs));
        Self { ada: dense("final.ada", 2 * shape.width), output: dense("final.out", shape.action) }
    }
}

/// The head on one micro-batch: inputs are tokens `[b * r * t, d]` and the condition `[b * r, d]`; returns
/// the velocity `[b * r * horizon, action]` of the last `horizon` tokens of each draw.
///
/// The chunk order is `shift, scale` here and `scale, shift` in the blocks; so it is in GR00T and starVLA.
pub(super) struct HeadSegment<'a> {
    pub head: &'a Head,
    pub rows: Arc<Rows>,
    pub horizon: usize,
}

impl<B: Tape<Base = B>> Segment<B> for HeadSegment<'_> {
    fn run<T: Tape<Base = B>>(&self, params: &ParamScope<'_, T>, inputs: &[Tensor<T, 2>]) -> Tensor<T, 2> {
        let [x_nd, cond_md] = inputs else { unreachable!("the head has two inputs") };
        let (draws, width) = (self.rows.batch * self.rows.repeats, x_nd.dims()[1]);
        let x_mtd = x_nd.clone().reshape([draws, self.rows.tokens, width]);
        let action_nd = x_mtd
            .narrow(1, self.rows.tokens - self.horizon, self.horizon)
            .reshape([draws * self.horizon, width]);
        let ada_md = self.head.ada.apply(params, cond_md.clone());
        let y_nd = T::ada_layer_norm(action_nd, ada_md, AdaNorm { shift_first: true, eps: EPS });
        self.head.output.apply(params, y_nd)
    }
}
