//! The gated MLP of both towers: `down(silu(gate(x)) * up(x))`.

use burn::tensor::Tensor;

use super::stack::Linears;
use crate::{
    kernels::{ModelBackend, Tape},
    lora::LoraLinear,
    params::{Keep, ParamScope},
};

/// `down(silu(gate(x)) * up(x))`.
pub struct GatedMlp<B: ModelBackend> {
    gate: LoraLinear<B>,
    up: LoraLinear<B>,
    down: LoraLinear<B>,
}

impl<B: ModelBackend> GatedMlp<B> {
    /// Takes gate, up and down, a block's next three linears.
    pub fn assemble(linears: &mut Linears<B>) -> Self {
        Self { gate: linears.take(), up: linears.take(), down: linears.take() }
    }

    /// `residual` plus the MLP of `x`: the output of half a block. All `[n, d]`.
    pub fn forward_onto<T: Tape<Base = B>>(
        &self,
        params: &ParamScope<'_, T>,
        residual_nd: Tensor<T, 2>,
        x_nd: Tensor<T, 2>,
    ) -> Tensor<T, 2> {
        // Half of what the two wide products give is kept by selective recompute: their outputs are most of a block's.
        let gate_nf = self.gate.forward_as(params, Keep::Output, x_nd.clone());
        let up_nf = self.up.forward_as(params, Keep::Never, x_nd);
        self.down.forward_onto(params, residual_nd, T::swiglu(gate_nf, up_nf))
    }

    /// Whether any of its linears has an adapter.
    pub fn trains(&self) -> bool {
        self.gate.trains() || self.up.trains() || self.down.trains()
    }
}
