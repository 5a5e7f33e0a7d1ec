//! pi0.5 behind its prefix: actions alone, through layers whose norms are told the time. What leads is the
//! time, which goes from layer to layer as it is.
//!
//! ```text
//! time [b, e]              silu(time_mlp_out(silu(time_mlp_in(sinusoids(t)))))
//! actions [b * c, e]       action_in_proj(x)
//! velocity [b * c, padded] action_out_proj(norm(actions, time))
//! ```

use burn::tensor::{Tensor, activation::silu};
use coxswain_models::{
    joint::{JointOutline, LayerKind, LayerSource, StreamLinears, StreamShape},
    pretrained::error::ModelError,
};
use coxswain_nn::{
    kernels::{ModelBackend, Tape},
    lora::LoraLinear,
    params::ParamScope,
};

use super::{
    adaptive_norm::{AdaptiveNorm, Time, gated},
    config::PiConfig,
    names::EXPERT_AT,
};
use crate::{
    dropped::SuffixRows,
    features::PolicyFeatures,
    policy::PolicySizes,
    prefix::Prefix,
    rotary::{Rotary, attend, by_head, key_mask},
    suffix::{Inputs, LayerPlace, Suffix},
};

/// The expert and its projections.
pub(super) struct TimedSuffix<B: ModelBackend> {
    features: PolicyFeatures,
    periods: [f64; 2],
    shape: StreamShape,
    layers: Vec<TimedLayer<B>>,
    action_in: LoraLinear<B>,
    action_out: LoraLinear<B>,
    time_in: LoraLinear<B>,
    time_out: LoraLinear<B>,
    norm: AdaptiveNorm<B>,
}

/// A layer of the expert.
struct TimedLayer<B: ModelBackend> {
    linears: StreamLinears<B>,
    norm: AdaptiveNorm<B>,
    mlp_norm: AdaptiveNorm<B>,
}

/// What all layers share of a micro-batch.
pub(super) struct TimedContext<B: ModelBackend> {
    batch: usize,
    /// Where actions stand behind the prefix.
    rotary: Rotary<B>,
    /// Which keys they see, `[b, 1, 1, s + c]`.
    mask: Tensor<B, 4>,
}

impl<B: ModelBackend> TimedSuffix<B> {
    /// Loads it beside such a model.
    pub fn load(
        source: &mut dyn LayerSource<B>,
        config: &PiConfig,
        vlm: &JointOutline,
    ) -> Result<Self, ModelError> {
        let shape = config.expert(&vlm.layer);
        let StreamShape { width, eps, .. } = shape;
        let layers = (0..vlm.layers).map(|number| {
            let at = format!("{EXPERT_AT}.layers.{number}");
            let linears = StreamLinears::load(source, &at, shape, LayerKind::Gemma)?;
            let mut norm = |name: &str| AdaptiveNorm::load(source, &format!("{at}.{name}"), width, eps);
            Ok::<_, ModelError>(TimedLayer {
                linears,
                norm: norm("input_layernorm")?,
                mlp_norm: norm("post_attention_layernorm")?,
            })
        });
        let layers = layers.collect::<Result<_, _>>()?;
        let [action_in, action_out, time_in, time_out] =
            config.told_linears().map(|(name, features)| source.linear(name, features, true));
        let norm = AdaptiveNorm::load(source, &format!("{EXPERT_AT}.norm"), width, eps)?;
        Ok(Self {
            features: config.features.clone(),
            periods: config.periods,
            shape,
            layers,
            action_in: action_in?,
            action_out: action_out?,
            time_in: time_in?,
            time_out: time_out?,
            norm,
        })
    }
}

impl<B: Tape<Base = B>> Suffix<B> for TimedSuffix<B> {
    type Context = TimedContext<B>;

    const LEAD_IS_FIXED: bool = false;

    fn sizes(&self) -> PolicySizes<'_> {
        self.features.sizes()
    }

    fn width(&self) -> usize {
        self.shape.width
    }

    fn context(&self, prefix: &Prefix<'_, B>, device: &B::Device) -> TimedContext<B> {
        let (batch, chunk) = (prefix.valid.len(), self.features.chunk);
        let lengths = prefix.valid.iter().map(|row| row.len() as u32);
        let positions: Vec<u32> =
            lengths.flat_map(|length| (0..chunk as u32).map(move |place| length + place)).collect();
        TimedContext {
            batch,
            rotary: Rotary::new(&positions, batch, self.shape.head_dim, device),
            mask: key_mask(&prefix.valid, [prefix.seq, chunk], device),
        }
    }

    fn lead<T: Tape<Base = B>>(&self, params: &ParamScope<'_, T>, given: Inputs<'_, B>) -> Tensor<T, 2> {
        let sinusoids_be = T::lift(given.sinusoids_be(self.shape.width, self.periods));
        let inner_be = silu(self.time_in.forward(params, sinusoids_be));
        silu(self.time_out.forward(params, inner_be))
    }

    fn actions<T: Tape<Base = B>>(&self, params: &ParamScope<'_, T>, given: Inputs<'_, B>) -> Tensor<T, 2> {
        self.action_in.forward(params, T::lift(given.noisy_nc(self.features.padded[1])))
    }

    fn read<T: Tape<Base = B>>(
        &self,
        _params: &ParamScope<'_, T>,
        at: &LayerPlace<'_, B, TimedContext<B>>,
        time_be: Tensor<T, 2>,
        known: [Tensor<T, 2>; 2],
    ) -> (Option<Tensor<T, 2>>, [Tensor<T, 4>; 2]) {
        (Some(time_be), by_head(known, at.context.batch, &self.shape))
    }

    fn act<T: Tape<Base = B>>(
        &self,
        params: &ParamScope<'_, T>,
        at: &LayerPlace<'_, B, TimedContext<B>>,
        time_be: &Tensor<T, 2>,
        [known_k, known_v]: [Tensor<T, 4>; 2],
        x_ne: Tensor<T, 2>,
    ) -> Tensor<T, 2> {
        let TimedLayer { linears, norm, mlp_norm } = &self.layers[at.number];
        let TimedContext { batch, rotary, mask } = at.context;
        let time = Time { rows_be: time_be, dropout: at.rows.map(|rows| &rows.state) };
        let (y_ne, gate_b1e) = norm.run(params, x_ne.clone(), &time);
        let q_bchk = rotary.rotate(linears.queries(params, y_ne.clone(), *batch));
        let [k_bchk, v_bchk] = linears.keys_values(params, [y_ne.clone(), y_ne], *batch);
        let k_bshk = Tensor::cat(vec![known_k, rotary.rotate(k_bchk)], 1);
        let v_bshk = Tensor::cat(vec![known_v, v_bchk], 1);
        let heads_bchk = attend(q_bchk, [k_bshk, v_bshk], mask);
        let x_ne = gated(x_ne, gate_b1e, linears.attended(params, heads_bchk));
        let (z_ne, gate_b1e) = mlp_norm.run(params, x_ne.clone(), &time);
        gated(x_ne, gate_b1e, linears.mlp(params, z_ne))
    }

    fn velocity<T: Tape<Base = B>>(
        &self,
        params: &ParamScope<'_, T>,
        rows: Option<&SuffixRows<B>>,
        time_be: Option<Tensor<T, 2>>,
        x_ne: Tensor<T, 2>,
    ) -> Tensor<T, 2> {
        let time_be = time_be.expect("it goes through every layer");
        let time = Time { rows_be: &time_be, dropout: rows.map(|rows| &rows.state) };
        let (normed_ne, _) = self.norm.run(params, x_ne, &time);
        self.action_out.forward(params, normed_ne)
    }
}
