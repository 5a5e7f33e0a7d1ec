//! The expert's two ends: what turns state, sensors, noisy actions and flow time into tokens and a condition,
//! and what turns tokens back into a velocity.
//!
//! ```text
//! actions   W_1 a    or  W_3 silu(W_2 [W_1 a; sinusoids(1000 t)])      `expert.action_encoder`
//! state     W s      or  W_2 relu(W_1 s)                               `expert.state_encoder`
//! velocity  W y      or  W_3 relu(W_2 W_1 y)                           `expert.action_decoder`
//! ```
//!
//! Before the velocity's decoder stands an AdaLN, but in a layerwise expert.

use std::sync::Arc;

use burn::tensor::{
    Tensor, TensorData,
    activation::{relu, silu},
    backend::Backend,
};

use coxswain_nn::{
    dense::{Dense, DenseShape},
    kernels::{AdaNorm, Tape},
    params::{Init, ParamId, ParamScope},
    recompute::segment::Segment,
};

use super::{ExpertShape, block::Rows, registrar::Registrar};

/// Width of the sinusoidal time embedding.
const TIME_WIDTH: usize = 256;
/// Epsilon of the last layer norm.
const EPS: f64 = 1e-6;
/// Standard deviation of positions and of the time embedding's layers, as DiT has it.
const SMALL: f32 = 0.02;

/// Flow times in thousandths, as their sinusoids are of; a layerwise expert's are whole ones.
pub(super) fn thousandths(times: &[f32], whole: bool) -> Vec<f64> {
    let of = |&t: &f32| if whole { f64::from((1000.0 * t).trunc()) } else { 1000.0 * f64::from(t) };
    times.iter().map(of).collect()
}

/// `[cos | sin]` of thousandths at 128 frequencies from 1 to 1e-4, as diffusers' `Timesteps(256,
/// flip_sin_to_cos=True, downscale_freq_shift=1)` makes them. `thousandths` `[m]`; returns `[m, 256]`.
pub(super) fn sinusoids<B: Backend>(thousandths: &[f64], device: &B::Device) -> Tensor<B, 2> {
    let half = TIME_WIDTH / 2;
    let mut table = vec![0.0f32; thousandths.len() * TIME_WIDTH];
    for (row, &t) in table.chunks_exact_mut(TIME_WIDTH).zip(thousandths) {
        for i in 0..half {
            let frequency = (-(10_000f64.ln()) * i as f64 / (half - 1) as f64).exp();
            let (sin, cos) = (t * frequency).sin_cos();
            row[i] = cos as f32;
            row[half + i] = sin as f32;
        }
    }
    Tensor::from_data(TensorData::new(table, [thousandths.len(), TIME_WIDTH]), device)
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
        let h_md = self.embedding.first.apply(params, T::lift(self.sinusoids_mf.clone()));
        silu(self.embedding.second.apply(params, silu(h_md)))
    }
}

/// Sinusoids of thousandths as wide as a token, `[sin | cos]` at frequencies from 1 down to 1e-4: what GR00T
/// and starVLA mix into action tokens. `thousandths` `[m]`; returns `[m, width]`.
pub(super) fn token_sinusoids<B: Backend>(
    thousandths: &[f64],
    width: usize,
    device: &B::Device,
) -> Tensor<B, 2> {
    let half = width / 2;
    let mut table = vec![0.0f32; thousandths.len() * width];
    for (row, &t) in table.chunks_exact_mut(width).zip(thousandths) {
        for i in 0..half {
            let frequency = (-(10_000f64.ln()) * i as f64 / half as f64).exp();
            let (sin, cos) = (t * frequency).sin_cos();
            row[i] = sin as f32;
            row[half + i] = cos as f32;
        }
    }
    Tensor::from_data(TensorData::new(table, [thousandths.len(), width]), device)
}

/// Two linear layers with a ReLU between.
#[derive(Clone, Debug)]
struct Mlp {
    first: Dense,
    second: Dense,
}

impl Mlp {
    /// `{name}.in` and `{name}.out`.
    fn register(registrar: &mut Registrar<'_>, name: &str, first: DenseShape, second: DenseShape) -> Self {
        Self {
            first: registrar.dense(&format!("{name}.in"), first),
            second: registrar.dense(&format!("{name}.out"), second),
        }
    }

    fn apply<T: Tape>(&self, params: &ParamScope<'_, T>, x_ni: Tensor<T, 2>) -> Tensor<T, 2> {
        self.second.apply(params, relu(self.first.apply(params, x_ni)))
    }

    fn trains(&self) -> bool {
        self.first.trains() || self.second.trains()
    }
}

/// What makes a token of the state.
#[derive(Clone, Debug)]
enum StateEncoder {
    Linear(Dense),
    Mlp(Mlp),
}

/// State and action projections and the learned positions.
#[derive(Clone, Debug)]
pub(super) struct TokenEmbedding {
    /// None where a policy has no state.
    state: Option<StateEncoder>,
    action: Dense,
    /// Where time is mixed into actions: the layer that reads both, and the one behind it.
    action_time: Option<[Dense; 2]>,
    positions: ParamId,
    future: Option<ParamId>,
}

impl TokenEmbedding {
    pub fn register(registrar: &mut Registrar<'_>, shape: &ExpertShape) -> Self {
        let (width, form) = (shape.width, shape.form);
        let xavier = DenseShape::xavier;
        let state = (shape.state > 0).then(|| match form.state_hidden {
            None => StateEncoder::Linear(registrar.dense("state", xavier(shape.state, width))),
            Some(hidden) => StateEncoder::Mlp(Mlp::register(
                registrar,
                "state",
                xavier(shape.state, hidden),
                xavier(hidden, width),
            )),
        });
        let action = registrar.dense("action", xavier(shape.action, width));
        let action_time = form.time_in_actions.then(|| {
            [("action_time.in", 2 * width), ("action_time.out", width)]
                .map(|(name, inputs)| registrar.dense(name, xavier(inputs, width)))
        });
        let small = Init::Normal(SMALL);
        let positions = registrar.tensor("positions", &[shape.placed_tokens(), width], small);
        let future =
            (form.future_tokens > 0).then(|| registrar.tensor("future", &[form.future_tokens, width], small));
        Self { state, action, action_time, positions, future }
    }

    /// Whether anything of it trains.
    pub fn trains(&self) -> bool {
        let state = match &self.state {
            Some(StateEncoder::Linear(dense)) => dense.trains(),
            Some(StateEncoder::Mlp(mlp)) => mlp.trains(),
            None => false,
        };
        let denses = self.action_time.iter().flatten().chain([&self.action]).any(Dense::trains);
        state || denses || matches!(self.positions, ParamId::Trained(_))
    }
}

impl StateEncoder {
    fn apply<T: Tape>(&self, params: &ParamScope<'_, T>, state_bc: Tensor<T, 2>) -> Tensor<T, 2> {
        match self {
            Self::Linear(dense) => dense.apply(params, state_bc),
            Self::Mlp(mlp) => mlp.apply(params, state_bc),
        }
    }
}

/// Token embedding of one micro-batch. Its only input, if any, is the sensor tokens `[b * sensor_tokens, d]`.
pub(super) struct TokenSegment<'a, B: Tape<Base = B>> {
    pub embedding: &'a TokenEmbedding,
    pub rows: Arc<Rows>,
    /// `[b, state]`; none without a state.
    pub state_bc: Option<Tensor<B, 2>>,
    /// `[b * r * horizon, action]`.
    pub noisy_nc: Tensor<B, 2>,
    /// `[b * r, d]`, where time is mixed into actions.
    pub sinusoids_md: Option<Tensor<B, 2>>,
}

impl<B: Tape<Base = B>> TokenSegment<'_, B> {
    /// Action tokens, `[b * r * horizon, d]`.
    fn actions<T: Tape<Base = B>>(&self, params: &ParamScope<'_, T>) -> Tensor<T, 2> {
        let action_nd = self.embedding.action.apply(params, T::lift(self.noisy_nc.clone()));
        let (Some([first, second]), Some(sinusoids_md)) = (&self.embedding.action_time, &self.sinusoids_md)
        else {
            return action_nd;
        };
        let ([rows, width], [draws, _]) = (action_nd.dims(), sinusoids_md.dims());
        let time_mhd = T::lift(sinusoids_md.clone()).reshape([draws, 1, width]);
        let time_nd = time_mhd.expand([draws, rows / draws.max(1), width]).reshape([rows, width]);
        let both_ne = Tensor::cat(vec![action_nd, time_nd], 1);
        second.apply(params, silu(first.apply(params, both_ne)))
    }
}

impl<B: Tape<Base = B>> Segment<B> for TokenSegment<'_, B> {
    fn run<T: Tape<Base = B>>(&self, params: &ParamScope<'_, T>, inputs: &[Tensor<T, 2>]) -> Tensor<T, 2> {
        let Rows { batch, repeats, tokens, .. } = *self.rows;
        let state = self.embedding.state.as_ref().zip(self.state_bc.clone());
        let state_bd = state.map(|(encoder, state_bc)| encoder.apply(params, T::lift(state_bc)));
        let action_nd = self.actions(params);
        let width = action_nd.dims()[1];
        // State and sensors are the same in every repeat.
        let spread = |x_nd: Tensor<T, 2>| {
            let length = x_nd.dims()[0] / batch;
            x_nd.reshape([batch, 1, length, width]).expand([batch, repeats, length, width])
        };
        let horizon = action_nd.dims()[0] / (batch * repeats);
        let mut parts: Vec<_> = state_bd.into_iter().map(spread).collect();
        parts.extend(inputs.iter().cloned().map(spread));
        parts.push(action_nd.reshape([batch, repeats, horizon, width]));
        let positions_td = params.get::<2>(self.embedding.positions);
        let placed = positions_td.dims()[0];
        let mut x_brtd = Tensor::cat(parts, 2) + positions_td.reshape([1, 1, placed, width]);
        if let Some(future) = self.embedding.future {
            let future_fd = params.get::<2>(future);
            let count = future_fd.dims()[0];
            let future = future_fd.reshape([1, 1, count, width]).expand([batch, repeats, count, width]);
            let before = placed - horizon;
            let own = (before > 0).then(|| x_brtd.clone().narrow(2, 0, before));
            let parts = own.into_iter().chain([future, x_brtd.narrow(2, before, horizon)]);
            x_brtd = Tensor::cat(parts.collect(), 2);
        }
        x_brtd.reshape([batch * repeats * tokens, width])
    }
}

/// Final AdaLN and projection to actions.
#[derive(Clone, Debug)]
pub(super) struct Head {
    /// The AdaLN's scale and shift, and the layer behind it; a layerwise expert has a decoder alone.
    modulated: Option<[Dense; 2]>,
    decoder: Option<Mlp>,
}

impl Head {
    pub fn register(registrar: &mut Registrar<'_>, shape: &ExpertShape) -> Self {
        let (width, action, form) = (shape.width, shape.action, shape.form);
        let xavier = DenseShape::xavier;
        let modulated = (!form.layerwise).then(|| {
            let output = match form.decoder_hidden {
                // The last of three layers is the one that starts at zero: below it ReLU would pass nothing
                // on.
                Some(hidden) => xavier(width, hidden),
                None => DenseShape::zeros(width, action),
            };
            let ada = registrar.dense("final.ada", DenseShape::zeros(width, 2 * width));
            [ada, registrar.dense("final.out", output)]
        });
        let decoder = form.decoder_hidden.map(|hidden| {
            let first = xavier(if form.layerwise { width } else { hidden }, hidden);
            Mlp::register(registrar, "decoder", first, DenseShape::zeros(hidden, action))
        });
        Self { modulated, decoder }
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
        let out_no = match &self.head.modulated {
            Some([ada, output]) => {
                let ada_md = ada.apply(params, cond_md.clone());
                let y_nd = T::ada_layer_norm(action_nd, ada_md, AdaNorm { shift_first: true, eps: EPS });
                output.apply(params, y_nd)
            }
            None => action_nd,
        };
        match &self.head.decoder {
            Some(decoder) => decoder.apply(params, out_no),
            None => out_no,
        }
    }
}
