//! The feed-forward layers: two products, or three with a gate.

use burn::tensor::{Tensor, activation};
use coxswain_nn::{
    kernels::{ModelBackend, Tape},
    lora::{LoraLinear, forward_all},
    params::{Keep, ParamScope},
};

use super::config::{FeedForward, T5Config};
use crate::pretrained::{error::ModelError, loader::Loader};

/// One of them; which, follows from how many products there are.
pub struct DenseReluDense<B: ModelBackend> {
    /// `wi`, or `wi_0`, whose activation is the gate.
    wi: LoraLinear<B>,
    /// `wi_1`.
    gated: Option<LoraLinear<B>>,
    wo: LoraLinear<B>,
}

impl<B: ModelBackend> DenseReluDense<B> {
    /// Loads what is below `{at}.DenseReluDense`.
    pub fn load(loader: &mut Loader<'_, B>, config: &T5Config, at: &str) -> Result<Self, ModelError> {
        let (d, f) = (config.d_model, config.d_ff);
        let mut linear =
            |name: &str, shape| loader.linear(&format!("{at}.DenseReluDense.{name}"), shape, false);
        let (wi, gated) = match config.feed_forward {
            FeedForward::Relu => (linear("wi", [d, f])?, None),
            FeedForward::GatedGelu => (linear("wi_0", [d, f])?, Some(linear("wi_1", [d, f])?)),
        };
        Ok(Self { wi, gated, wo: linear("wo", [f, d])? })
    }

    /// `residual` plus the layer of `x`: the output of half a block. Both `[n, d]`.
    pub fn forward_residual<T: Tape<Base = B>>(
        &self,
        params: &ParamScope<'_, T>,
        residual_nd: Tensor<T, 2>,
        x_nd: Tensor<T, 2>,
    ) -> Tensor<T, 2> {
        let inner_nf = match &self.gated {
            None => {
                let [x_nf] = forward_all(params, [(&self.wi, Keep::Output)], x_nd);
                activation::relu(x_nf)
            }
            Some(gated) => {
                // Of two wide outputs selective recompute keeps one.
                let layers = [(&self.wi, Keep::Output), (gated, Keep::Never)];
                let [gate_nf, up_nf] = forward_all(params, layers, x_nd);
                T::gelu_tanh(gate_nf) * up_nf
            }
        };
        self.wo.forward_residual(params, residual_nd, inner_nf)
    }

    /// Whether anything of it trains.
    pub fn trains(&self) -> bool {
        self.wi.trains() || self.wo.trains() || self.gated.as_ref().is_some_and(LoraLinear::trains)
    }
}
