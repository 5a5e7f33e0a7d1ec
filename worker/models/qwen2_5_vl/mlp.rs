//! The gated MLP of both towers: `down(silu(gate(x)) * up(x))`.

use burn::tensor::{DType, Tensor};

use super::stack::Linears;
use coxswain_nn::{
    kernels::{ModelBackend, Tape},
    lora::{LoraLinear, forward_all},
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
    pub fn forward_residual<T: Tape<Base = B>>(
        &self,
        params: &ParamScope<'_, T>,
        residual_nd: Tensor<T, 2>,
        x_nd: Tensor<T, 2>,
    ) -> Tensor<T, 2> {
        // Half of what the two wide products give is kept by selective recompute: their outputs are most of a
        // block's.
        let [gate_nf, up_nf] =
            forward_all(params, [(&self.gate, Keep::Output), (&self.up, Keep::Never)], x_nd);
        let inner_nf = match self.down.rounds_input() {
            Some(to) => T::swiglu_for_rounding(gate_nf, up_nf, to),
            None => T::swiglu(gate_nf, up_nf),
        };
        self.down.forward_residual(params, residual_nd, inner_nf)
    }

    /// The type that it reads its input in, if both products round to the same, on a backend that rounds at
    /// all.
    pub fn rounds_input(&self) -> Option<DType> {
        self.gate.rounds_input().filter(|dtype| self.up.rounds_input() == Some(*dtype))
    }

    /// Whether any of its linears trains.
    pub fn trains(&self) -> bool {
        self.gate.trains() || self.up.trains() || self.down.trains()
    }
}
