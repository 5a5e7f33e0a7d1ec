//! A norm that is told the time: `rms_norm(x) (1 + scale) + shift`, and a gate of what is made of it, where
//! `[scale | shift | gate] = dense(time)`.

use burn::tensor::Tensor;
use coxswain_models::{joint::LayerSource, pretrained::error::ModelError};
use coxswain_nn::{
    kernels::{DropoutRows, ModelBackend, Tape},
    lora::LoraLinear,
    params::ParamScope,
};

/// The time of each sample, and how adapters drop of its rows.
pub(super) struct Time<'t, B: ModelBackend, T: ModelBackend> {
    /// `[b, e]`.
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
