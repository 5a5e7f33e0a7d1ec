//! The gated MLP of both towers: `down(silu(gate(x)) * up(x))`; and the norm before either half of a block.

use burn::tensor::{DType, Tensor};

use crate::pretrained::stack::Linears;
use coxswain_nn::{
    kernels::{ModelBackend, Tape},
    lora::{GroupOutputs, LinearGroup, LoraLinear},
    params::{Keep, ParamScope},
};

/// `down(silu(gate(x)) * up(x))`.
pub struct GatedMlp<B: ModelBackend> {
    gate_up: LinearGroup<B, 2>,
    down: LoraLinear<B>,
}

impl<B: ModelBackend> GatedMlp<B> {
    /// Takes gate, up and down, a block's next three linears.
    pub fn assemble(linears: &mut Linears<B>) -> Self {
        Self { gate_up: linears.take_group(), down: linears.take() }
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
        let outputs = self.gate_up.forward(params, [Keep::Output, Keep::Never], x_nd, true);
        let inner_nf = match (outputs, self.down.rounds_input()) {
            (GroupOutputs::Joined(gate_up_ne), _) => T::swiglu_joined(gate_up_ne, self.down.narrow()),
            (GroupOutputs::Apart([gate_nf, up_nf]), Some(to)) => T::swiglu_for_rounding(gate_nf, up_nf, to),
            (GroupOutputs::Apart([gate_nf, up_nf]), None) => T::swiglu(gate_nf, up_nf),
        };
        self.down.forward_residual(params, residual_nd, inner_nf)
    }

    /// The type that it reads its input in, if both products round to the same, on a backend that rounds at
    /// all.
    pub fn rounds_input(&self) -> Option<DType> {
        self.gate_up.rounds_input()
    }

    /// Whether any of its linears trains.
    pub fn trains(&self) -> bool {
        self.gate_up.trains() || self.down.trains()
    }
}

/// The norm of either half of a block, for layers that round it or do not.
pub fn normed<T: Tape>(
    x_nd: &Tensor<T, 2>,
    gain_d: Tensor<T, 1>,
    eps: f64,
    rounded: Option<DType>,
) -> Tensor<T, 2> {
    match rounded {
        Some(to) => T::rms_norm_for_rounding(x_nd.clone(), gain_d, eps, to),
        None => T::rms_norm(x_nd.clone(), gain_d, eps),
    }
}
