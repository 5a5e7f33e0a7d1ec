//! What turns a state, noisy actions and the flow's time into tokens, and tokens back into velocities.
//!
//! ```text
//! state     L2 relu(L1 s)
//! actions   W3 swish(W2 [W1 a | sinusoids(m)]) + position
//! velocity  L2 relu(L1 (W_out (layer_norm(x) (1 + scale) + shift)))     shift, scale = W c + b
//! time      c = silu(W silu(W sinusoids(m)))       m: thousandths of t, cut to whole ones
//! ```
//!
//! `L` and `W1` to `W3` have weights for each embodiment, of which one is used; the rest has no gradient.

use std::sync::Arc;

use burn::tensor::{
    DType, Tensor,
    activation::{relu, silu},
};
use coxswain_models::{joint::LayerSource, pretrained::error::ModelError};
use coxswain_nn::{
    kernels::{AdaNorm, Dropout, DropoutRows, ModelBackend, Tape, dropout::module_word},
    lora::LoraLinear,
    params::{BaseWeight, ParamScope},
    recompute::segment::Segment,
};

use super::{block::BlockRows, config::HeadSizes, names::HEAD};
use crate::{batch::Draws, rotary::placed, source::ExpertSource};

/// Width of the sinusoids that the time's condition is made of.
pub(super) const TIME_WIDTH: usize = 256;
/// Epsilon of the last norm.
const EPS: f64 = 1e-6;

/// A linear with weights for each embodiment, `[embodiments, in, out]`.
pub(super) struct EmbodimentLinear<B: ModelBackend> {
    weight: BaseWeight<B, 2>,
    bias: BaseWeight<B, 2>,
    features: [usize; 2],
    embodiment: usize,
}

/// The linears by embodiment, behind `HEAD`, and their features.
pub(super) fn embodiment_linears(sizes: &HeadSizes) -> [(&'static str, [usize; 2]); 7] {
    let HeadSizes { width, hidden, padded: [state, action], .. } = *sizes;
    [
        ("state_encoder.layer1", [state, hidden]),
        ("state_encoder.layer2", [hidden, width]),
        ("action_encoder.W1", [action, width]),
        ("action_encoder.W2", [2 * width, width]),
        ("action_encoder.W3", [width, width]),
        ("action_decoder.layer1", [hidden, hidden]),
        ("action_decoder.layer2", [hidden, action]),
    ]
}

/// The other linears here, behind `HEAD`, and their features.
pub(super) fn linears(sizes: &HeadSizes) -> [(&'static str, [usize; 2]); 4] {
    let HeadSizes { width, hidden, .. } = *sizes;
    [
        ("model.timestep_encoder.timestep_embedder.linear_1", [TIME_WIDTH, width]),
        ("model.timestep_encoder.timestep_embedder.linear_2", [width, width]),
        ("model.proj_out_1", [width, 2 * width]),
        ("model.proj_out_2", [width, hidden]),
    ]
}

impl<B: Tape<Base = B>> EmbodimentLinear<B> {
    fn load(
        source: &mut ExpertSource<'_, '_, B>,
        name: &str,
        features: [usize; 2],
        sizes: &HeadSizes,
    ) -> Result<Self, ModelError> {
        let [inputs, outputs] = features;
        let count = sizes.embodiments;
        Ok(Self {
            weight: source.table(&format!("{HEAD}.{name}.W"), &[count, inputs, outputs])?,
            bias: source.table(&format!("{HEAD}.{name}.b"), &[count, outputs])?,
            features,
            embodiment: sizes.embodiment,
        })
    }

    fn trains(&self) -> bool {
        self.weight.trains() || self.bias.trains()
    }

    fn forward<T: Tape<Base = B>>(&self, params: &ParamScope<'_, T>, x_ni: Tensor<T, 2>) -> Tensor<T, 2> {
        let own = |weight: &BaseWeight<B, 2>| {
            let row = weight.on_tape(params).narrow(0, self.embodiment, 1);
            if row.dtype() == DType::F32 { row } else { row.cast(DType::F32) }
        };
        x_ni.matmul(own(&self.weight).reshape(self.features)) + own(&self.bias)
    }
}

/// All of it.
pub(super) struct Ends<B: ModelBackend> {
    sizes: HeadSizes,
    by_embodiment: [EmbodimentLinear<B>; 7],
    positions: BaseWeight<B, 2>,
    time: [LoraLinear<B>; 2],
    out: [LoraLinear<B>; 2],
    /// Rate at which tokens of states are dropped.
    dropout: f64,
    word: u64,
}

impl<B: Tape<Base = B>> Ends<B> {
    /// Loads it; so much of the states is dropped in training.
    pub fn load(
        source: &mut ExpertSource<'_, '_, B>,
        sizes: &HeadSizes,
        dropout: f64,
    ) -> Result<Self, ModelError> {
        let by_embodiment = embodiment_linears(sizes)
            .map(|(name, features)| EmbodimentLinear::load(source, name, features, sizes));
        let [s1, s2, a1, a2, a3, v1, v2] = by_embodiment;
        let by_embodiment = [s1?, s2?, a1?, a2?, a3?, v1?, v2?];
        let table = format!("{HEAD}.position_embedding.weight");
        let positions = source.table(&table, &[sizes.positions, sizes.width])?;
        let mut linear = |number: usize| {
            let (name, features) = linears(sizes)[number];
            source.linear(&format!("{HEAD}.{name}"), features, true)
        };
        let time = [linear(0)?, linear(1)?];
        let out = [linear(2)?, linear(3)?];
        let word = module_word(&format!("{HEAD}.state_encoder"));
        Ok(Self { sizes: *sizes, by_embodiment, positions, time, out, dropout, word })
    }

    /// Whether anything of the time's condition trains.
    pub fn time_trains(&self) -> bool {
        self.time.iter().any(LoraLinear::trains)
    }

    /// Whether anything of what tokens are made of trains.
    pub fn tokens_train(&self) -> bool {
        self.by_embodiment[..5].iter().any(EmbodimentLinear::trains) || self.positions.trains()
    }
}

/// The times of a micro-batch as `[b, width]`; a segment without inputs.
pub(super) struct TimeSegment<'a, B: ModelBackend> {
    pub ends: &'a Ends<B>,
    pub times: &'a [f32],
    pub device: &'a B::Device,
}

impl<B: Tape<Base = B>> Segment<B> for TimeSegment<'_, B> {
    fn run<T: Tape<Base = B>>(&self, params: &ParamScope<'_, T>, _inputs: &[Tensor<T, 2>]) -> Tensor<T, 2> {
        let [first, second] = &self.ends.time;
        let waves = sinusoids::<B>(self.times, TIME_WIDTH, Waves::Cosines, self.device);
        silu(second.forward(params, silu(first.forward(params, T::lift(waves)))))
    }
}

/// Tokens of states and noisy actions, `[b * (1 + c), width]`; a segment without inputs.
pub(super) struct TokenSegment<'a, B: ModelBackend> {
    pub ends: &'a Ends<B>,
    /// `[b, padded]`.
    pub state: &'a [f32],
    pub draws: Draws<'a>,
    /// The states' rows, of which some are dropped.
    pub dropout: Option<&'a DropoutRows<B>>,
    pub device: &'a B::Device,
}

impl<B: Tape<Base = B>> TokenSegment<'_, B> {
    /// 0 for a state that is dropped, else 1: nothing is scaled up for it.
    fn kept(&self, batch: usize) -> Option<Tensor<B, 2>> {
        let rows = self.dropout.filter(|_| self.ends.dropout > 0.0)?.clone();
        let ones = Tensor::ones([batch, 1], self.device);
        if !B::VALUES {
            return Some(ones);
        }
        let drawn = Dropout { rows, module: self.ends.word, rate: self.ends.dropout }.apply(ones);
        Some(drawn * (1.0 - self.ends.dropout) as f32)
    }
}

impl<B: Tape<Base = B>> Segment<B> for TokenSegment<'_, B> {
    fn run<T: Tape<Base = B>>(&self, params: &ParamScope<'_, T>, _inputs: &[Tensor<T, 2>]) -> Tensor<T, 2> {
        let Ends { sizes, by_embodiment: [s1, s2, a1, a2, a3, ..], positions, .. } = self.ends;
        let HeadSizes { width, chunk, padded: [state, action], .. } = *sizes;
        let batch = self.draws.times.len();
        let state_bc = T::lift(placed::<B, 2>(self.state.to_vec(), [batch, state], self.device));
        let mut state_bd = s2.forward(params, relu(s1.forward(params, state_bc)));
        if let Some(kept_b1) = self.kept(batch) {
            state_bd = state_bd * T::lift(kept_b1);
        }
        let noisy_nc =
            T::lift(placed::<B, 2>(self.draws.noisy.to_vec(), [batch * chunk, action], self.device));
        let waves_bd = sinusoids::<B>(self.draws.times, width, Waves::Sines, self.device);
        let waves_bcd = waves_bd.unsqueeze_dim::<3>(1).expand([batch, chunk, width]);
        let waves_nd = T::lift(waves_bcd.reshape([batch * chunk, width]));
        let both_ne = Tensor::cat(vec![a1.forward(params, noisy_nc), waves_nd], 1);
        let action_nd = a3.forward(params, silu(a2.forward(params, both_ne)));
        let places_cd = positions.on_tape(params).narrow(0, 0, chunk);
        let places_cd = if places_cd.dtype() == DType::F32 { places_cd } else { places_cd.cast(DType::F32) };
        let action_bcd = action_nd.reshape([batch, chunk, width]) + places_cd.reshape([1, chunk, width]);
        let x_btd = Tensor::cat(vec![state_bd.reshape([batch, 1, width]), action_bcd], 1);
        x_btd.reshape([batch * (1 + chunk), width])
    }
}

/// Velocities `[b * c, action]`, of tokens `[b * (1 + c), width]` and times `[b, width]`.
pub(super) struct VelocitySegment<'a, B: ModelBackend> {
    pub ends: &'a Ends<B>,
    pub rows: Arc<BlockRows<B>>,
}

impl<B: Tape<Base = B>> Segment<B> for VelocitySegment<'_, B> {
    fn run<T: Tape<Base = B>>(&self, params: &ParamScope<'_, T>, inputs: &[Tensor<T, 2>]) -> Tensor<T, 2> {
        let [x_nd, time_bd] = inputs else { unreachable!("it has two inputs") };
        let Ends { sizes, by_embodiment: [.., v1, v2], out: [told, out], .. } = self.ends;
        let (batch, width, chunk) = (self.rows.batch, sizes.width, sizes.chunk);
        let x_btd = x_nd.clone().reshape([batch, 1 + chunk, width]).narrow(1, 1, chunk);
        let of_times = self.rows.dropout.as_ref().map(|[_, times]| times);
        let told_be = params.reading(of_times, || told.forward(params, time_bd.clone()));
        let how = AdaNorm { shift_first: true, eps: EPS };
        let y_nd = T::ada_layer_norm(x_btd.reshape([batch * chunk, width]), told_be, how);
        let y_nh = out.forward(params, y_nd);
        v2.forward(params, relu(v1.forward(params, y_nh)))
    }
}

/// Which half comes first, and how frequencies fall from 1 towards 1e-4.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Waves {
    /// Cosines; the last frequency is 1e-4.
    Cosines,
    /// Sines; 1e-4 is just not reached.
    Sines,
}

/// Sinusoids of whole thousandths, `[b, width]`, computed as PyTorch does: in float32.
fn sinusoids<B: ModelBackend>(times: &[f32], width: usize, waves: Waves, device: &B::Device) -> Tensor<B, 2> {
    let half = width / 2;
    let ln = 10_000f32.ln();
    let frequency = |i: usize| match waves {
        Waves::Cosines => (-ln * i as f32 / (half - 1) as f32).exp(),
        Waves::Sines => (-(i as f32) * (ln / half as f32)).exp(),
    };
    let row = |&time: &f32| {
        let thousandth = (time * 1000.0).trunc();
        let angles: Vec<f32> = (0..half).map(|i| thousandth * frequency(i)).collect();
        let (sines, cosines) = (angles.iter().map(|x| x.sin()), angles.iter().map(|x| x.cos()));
        let both: Vec<f32> = match waves {
            Waves::Cosines => cosines.chain(sines).collect(),
            Waves::Sines => sines.chain(cosines).collect(),
        };
        both
    };
    placed(times.iter().flat_map(row).collect(), [times.len(), width], device)
}
