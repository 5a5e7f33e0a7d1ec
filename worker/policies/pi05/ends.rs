//! What stands before the first layer and behind the last, and what tells the expert the time.
//!
//! ```text
//! time [b, e]              silu(time_mlp_out(silu(time_mlp_in(sinusoids(t)))))
//! actions [b * c, e]       action_in_proj(x)
//! velocity [b * c, padded] action_out_proj(norm(actions, time))
//! norm                     rms_norm(x) (1 + scale) + shift;  [scale | shift | gate] = dense(time)
//! ```

use burn::tensor::{Tensor, activation::silu};
use coxswain_models::{joint::LayerSource, pretrained::error::ModelError};
use coxswain_nn::{
    kernels::{DropoutRows, ModelBackend, Tape},
    lora::LoraLinear,
    params::ParamScope,
    recompute::segment::Segment,
};

use super::{config::Pi05Config, names::EXPERT_AT};

/// The projections, and the expert's last norm.
pub(super) struct Projections<B: ModelBackend> {
    action_in: LoraLinear<B>,
    action_out: LoraLinear<B>,
    time_in: LoraLinear<B>,
    time_out: LoraLinear<B>,
    norm: AdaptiveNorm<B>,
}

impl<B: ModelBackend> Projections<B> {
    /// Loads them beside an expert of width `e`, in whose norms `eps` is added to the mean square.
    pub fn load(
        source: &mut dyn LayerSource<B>,
        config: &Pi05Config,
        e: usize,
        eps: f64,
    ) -> Result<Self, ModelError> {
        let [action_in, action_out, time_in, time_out] =
            config.projections().map(|(name, features)| source.linear(name, features, true));
        let norm = AdaptiveNorm::load(source, &format!("{EXPERT_AT}.norm"), e, eps)?;
        let (action_in, action_out) = (action_in?, action_out?);
        Ok(Self { action_in, action_out, time_in: time_in?, time_out: time_out?, norm })
    }
}

/// What all layers share: the time of each sample, and how adapters drop of its rows.
pub(super) struct Time<'t, B: ModelBackend, T: ModelBackend> {
    /// Of each sample, `[b, e]`.
    pub rows_be: &'t Tensor<T, 2>,
    /// As adapters drop of them.
    pub dropout: Option<&'t DropoutRows<B>>,
}

/// A norm that is told the time.
pub(super) struct AdaptiveNorm<B: ModelBackend> {
    dense: LoraLinear<B>,
    eps: f64,
}

impl<B: ModelBackend> AdaptiveNorm<B> {
    /// Loads the norm of tokens of width `e` at this path.
    pub fn load(source: &mut dyn LayerSource<B>, at: &str, e: usize, eps: f64) -> Result<Self, ModelError> {
        Ok(Self { dense: source.linear(&format!("{at}.dense"), [e, 3 * e], true)?, eps })
    }

    /// Tokens `[b * c, e]`, normed, and the gate `[b, 1, e]` of what is made of them.
    pub fn run<T: Tape<Base = B>>(
        &self,
        params: &ParamScope<'_, T>,
        x_ne: Tensor<T, 2>,
        time: &Time<'_, B, T>,
    ) -> (Tensor<T, 2>, Tensor<T, 3>) {
        let ([rows, e], batch) = (x_ne.dims(), time.rows_be.dims()[0]);
        let told = params.reading(time.dropout, || self.dense.forward(params, time.rows_be.clone()));
        let told_b13e = told.reshape([batch, 1, 3 * e]);
        let part = |number: usize| told_b13e.clone().narrow(2, number * e, e);
        let normed_ne = T::rms_norm(x_ne.clone(), Tensor::ones([e], &x_ne.device()), self.eps);
        let normed_bce = normed_ne.reshape([batch, rows / batch.max(1), e]);
        let y_bce = normed_bce * (part(0) + 1.0) + part(1);
        (y_bce.reshape([rows, e]), part(2))
    }
}

/// `x + gate y`, of tokens `[b * c, e]` and a gate `[b, 1, e]`.
pub(super) fn gated<T: ModelBackend>(
    x_ne: Tensor<T, 2>,
    gate_b1e: Tensor<T, 3>,
    y_ne: Tensor<T, 2>,
) -> Tensor<T, 2> {
    let ([rows, e], [batch, ..]) = (x_ne.dims(), gate_b1e.dims());
    let y_bce = y_ne.reshape([batch, rows / batch.max(1), e]) * gate_b1e;
    x_ne + y_bce.reshape([rows, e])
}

/// The times, of sinusoids `[b, e]`.
pub(super) struct TimeSegment<'a, B: Tape<Base = B>> {
    pub ends: &'a Projections<B>,
    pub sinusoids_be: Tensor<B, 2>,
}

impl<B: Tape<Base = B>> Segment<B> for TimeSegment<'_, B> {
    fn run<T: Tape<Base = B>>(&self, params: &ParamScope<'_, T>, _inputs: &[Tensor<T, 2>]) -> Tensor<T, 2> {
        let Projections { time_in, time_out, .. } = self.ends;
        let inner_be = silu(time_in.forward(params, T::lift(self.sinusoids_be.clone())));
        silu(time_out.forward(params, inner_be))
    }
}

/// The expert's tokens, of noisy actions `[b * c, padded]`.
pub(super) struct ActionTokens<'a, B: Tape<Base = B>> {
    pub ends: &'a Projections<B>,
    pub noisy_nc: Tensor<B, 2>,
}

impl<B: Tape<Base = B>> Segment<B> for ActionTokens<'_, B> {
    fn run<T: Tape<Base = B>>(&self, params: &ParamScope<'_, T>, _inputs: &[Tensor<T, 2>]) -> Tensor<T, 2> {
        self.ends.action_in.forward(params, T::lift(self.noisy_nc.clone()))
    }
}

/// Velocities, of the last layer's `[b * c, e]` and the times.
pub(super) struct TimedVelocity<'a, B: Tape<Base = B>> {
    pub ends: &'a Projections<B>,
    pub dropout: Option<&'a DropoutRows<B>>,
}

impl<B: Tape<Base = B>> Segment<B> for TimedVelocity<'_, B> {
    fn run<T: Tape<Base = B>>(&self, params: &ParamScope<'_, T>, inputs: &[Tensor<T, 2>]) -> Tensor<T, 2> {
        let Projections { norm, action_out, .. } = self.ends;
        let time = Time { rows_be: &inputs[1], dropout: self.dropout };
        let (normed_ne, _) = norm.run(params, inputs[0].clone(), &time);
        action_out.forward(params, normed_ne)
    }
}
