//! A block: attention, then an MLP without a gate, each behind a norm and added to what it read.
//!
//! `n` tokens of `b` rows of `s`, `d` wide; `h` heads of `k`; `f` values inside the MLP.

use burn::tensor::Tensor;
use coxswain_models::pretrained::{
    loader::LinearShape,
    stack::{Assemble, Manifest, Parts},
};
use coxswain_nn::{
    block::Block as Halves,
    kernels::{AttentionOps, ModelBackend, Tape},
    lora::{LoraLinear, forward_all},
    params::{BaseWeight, Keep, ParamScope},
};

use super::{config::Config, rows::RowsContext, rules::layer};

/// What block `index` is made of.
pub fn parts(config: &Config, index: usize) -> Manifest {
    let (at, d, f) = (layer(index), config.hidden_size, config.intermediate_size);
    let attention = ["seek", "offer", "give", "set"].map(|name| (format!("mix.{name}"), [d, d]));
    let mlp = [("up", [d, f]), ("down", [f, d])];
    let mlp = mlp.map(|(name, features)| (format!("mlp.{name}"), features));
    let linears = attention.into_iter().chain(mlp);
    Manifest {
        norms: ["before_mix", "before_mlp"].map(|norm| (format!("{at}.{norm}.weight"), d)).into(),
        linears: linears.map(|(name, features)| LinearShape::new(&at, &name, features, false)).collect(),
        groups: Vec::new(),
    }
}

pub use self::UngatedBlock as Block;

/// One block.
pub struct UngatedBlock<B: ModelBackend> {
    heads: usize,
    eps: f64,
    norms_d: [BaseWeight<B, 1>; 2],
    /// Query, key, value.
    inputs: [LoraLinear<B>; 3],
    out: LoraLinear<B>,
    up: LoraLinear<B>,
    down: LoraLinear<B>,
}

impl<B: ModelBackend> Assemble<B> for UngatedBlock<B> {
    type Sizes = Config;

    fn manifest(config: &Config, index: usize) -> Manifest {
        parts(config, index)
    }

    fn assemble(config: &Config, _index: usize, parts: Parts<B>) -> Self {
        let Parts { mut norms, mut linears } = parts;
        Self {
            heads: config.heads,
            eps: config.norm_eps,
            norms_d: [norms.take(), norms.take()],
            inputs: std::array::from_fn(|_| linears.take()),
            out: linears.take(),
            up: linears.take(),
            down: linears.take(),
        }
    }
}

impl<B: ModelBackend> Halves<B> for UngatedBlock<B> {
    type Context = RowsContext;

    fn attention_half<T: Tape<Base = B>>(
        &self,
        params: &ParamScope<'_, T>,
        x_nd: Tensor<T, 2>,
        context: &RowsContext,
    ) -> Tensor<T, 2> {
        let ([n, d], [b, s]) = (x_nd.dims(), context.axes);
        let (h, k) = (self.heads, d / self.heads);
        let y_nd = T::rms_norm(x_nd.clone(), self.norms_d[0].on_tape(params), self.eps);
        let inputs = self.inputs.each_ref().map(|linear| (linear, Keep::Output));
        let [q_bshk, k_bshk, v_bshk] =
            forward_all(params, inputs, y_nd).map(|y_nd| y_nd.reshape([b, s, h, k]));
        let scale = (k as f64).powf(-0.5);
        let out_bshk = <T as AttentionOps>::attention(q_bshk, k_bshk, v_bshk, &context.mask, scale);
        self.out.forward_residual(params, x_nd, out_bshk.reshape([n, d]))
    }

    fn mlp_half<T: Tape<Base = B>>(
        &self,
        params: &ParamScope<'_, T>,
        x_nd: Tensor<T, 2>,
        _context: &RowsContext,
    ) -> Tensor<T, 2> {
        let y_nd = T::rms_norm(x_nd.clone(), self.norms_d[1].on_tape(params), self.eps);
        let [up_nf] = forward_all(params, [(&self.up, Keep::Output)], y_nd);
        self.down.forward_residual(params, x_nd, T::gelu_tanh(up_nf))
    }

    fn trains(&self) -> bool {
        let linears = self.inputs.iter().chain([&self.out, &self.up, &self.down]);
        linears.into_iter().any(LoraLinear::trains) || self.norms_d.iter().any(BaseWeight::trains)
    }
}
