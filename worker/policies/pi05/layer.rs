//! Actions through one layer of the expert, beside the keys and values of the prefix.

use burn::tensor::Tensor;
use coxswain_models::{
    joint::{LayerKind, LayerSource, StreamLinears, StreamShape},
    pretrained::error::ModelError,
};
use coxswain_nn::{
    kernels::{ModelBackend, Tape},
    params::ParamScope,
    recompute::segment::Segment,
};

use super::ends::{AdaptiveNorm, Time, gated};
use crate::{
    dropped::SuffixRows,
    rotary::{Rotary, attend},
};

/// What all layers share of a micro-batch.
pub(super) struct ActionContext<B: ModelBackend> {
    /// Samples.
    pub batch: usize,
    /// Where actions stand behind the prefix.
    pub rotary: Rotary<B>,
    /// Which keys they see, `[b, 1, 1, s + c]`.
    pub mask: Tensor<B, 4>,
    /// As adapters drop of rows; none if they drop nothing.
    pub dropout: Option<SuffixRows<B>>,
}

/// A layer of the expert.
pub(super) struct ExpertLayer<B: ModelBackend> {
    shape: StreamShape,
    linears: StreamLinears<B>,
    norm: AdaptiveNorm<B>,
    mlp_norm: AdaptiveNorm<B>,
}

impl<B: ModelBackend> ExpertLayer<B> {
    /// Loads the layer at this path.
    pub fn load(source: &mut dyn LayerSource<B>, at: &str, shape: StreamShape) -> Result<Self, ModelError> {
        let linears = StreamLinears::load(source, at, shape, LayerKind::Gemma)?;
        let mut norm =
            |name: &str| AdaptiveNorm::load(source, &format!("{at}.{name}"), shape.width, shape.eps);
        let (norm, mlp_norm) = (norm("input_layernorm")?, norm("post_attention_layernorm")?);
        Ok(Self { shape, linears, norm, mlp_norm })
    }
}

impl<B: Tape<Base = B>> ExpertLayer<B> {
    /// Actions `[b * c, e]` through the layer, given keys (rotated) and values of the prefix, `[b * s, kv]`.
    pub fn run<T: Tape<Base = B>>(
        &self,
        params: &ParamScope<'_, T>,
        context: &ActionContext<B>,
        known: [Tensor<T, 2>; 2],
        [x_ne, time_be]: [Tensor<T, 2>; 2],
    ) -> Tensor<T, 2> {
        let Self { shape: StreamShape { kv_heads, head_dim, .. }, linears, norm, mlp_norm } = self;
        let ActionContext { batch, rotary, mask, dropout } = context;
        let time = Time { rows_be: &time_be, dropout: dropout.as_ref().map(|rows| &rows.state) };
        let (y_ne, gate_b1e) = norm.run(params, x_ne.clone(), &time);
        let q_bchk = rotary.rotate(linears.queries(params, y_ne.clone(), *batch));
        let [k_bchk, v_bchk] = linears.keys_values(params, [y_ne.clone(), y_ne], *batch);
        let [known_k, known_v] = known.map(|x_no| {
            let tokens = x_no.dims()[0] / (*batch).max(1);
            x_no.reshape([*batch, tokens, *kv_heads, *head_dim])
        });
        let k_bshk = Tensor::cat(vec![known_k, rotary.rotate(k_bchk)], 1);
        let v_bshk = Tensor::cat(vec![known_v, v_bchk], 1);
        let heads_bchk = attend(q_bchk, [k_bshk, v_bshk], mask);
        let x_ne = gated(x_ne, gate_b1e, linears.attended(params, heads_bchk));
        let (z_ne, gate_b1e) = mlp_norm.run(params, x_ne.clone(), &time);
        gated(x_ne, gate_b1e, linears.mlp(params, z_ne))
    }
}

/// A layer on one micro-batch: actions, the prefix's keys and values, and the times.
pub(super) struct ExpertSegment<'a, B: ModelBackend> {
    pub layer: &'a ExpertLayer<B>,
    pub context: &'a ActionContext<B>,
}

impl<B: Tape<Base = B>> Segment<B> for ExpertSegment<'_, B> {
    fn run<T: Tape<Base = B>>(&self, params: &ParamScope<'_, T>, inputs: &[Tensor<T, 2>]) -> Tensor<T, 2> {
        let [x_ne, known_k, known_v, time_be] = [0, 1, 2, 3].map(|number| inputs[number].clone());
        self.layer.run(params, self.context, [known_k, known_v], [x_ne, time_be])
    }
}
