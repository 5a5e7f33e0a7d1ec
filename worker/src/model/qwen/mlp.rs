//! The gated MLP of both towers: `down(silu(gate(x)) * up(x))`.

use burn::tensor::Tensor;

use super::{error::ModelError, loader::Loader};
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
    /// Loads `module.{gate,up,down}_proj`; `bias` for all three or none.
    pub fn load(
        loader: &mut Loader<'_, B>,
        module: &str,
        [width, inner]: [usize; 2],
        bias: bool,
    ) -> Result<Self, ModelError> {
        Ok(Self {
            gate: loader.linear(&format!("{module}.gate_proj"), [width, inner], bias)?,
            up: loader.linear(&format!("{module}.up_proj"), [width, inner], bias)?,
            down: loader.linear(&format!("{module}.down_proj"), [inner, width], bias)?,
        })
    }

    /// `[n, d]` to `[n, d]`, the last thing that half a block computes before its residual sum.
    pub fn forward<T: Tape<Base = B>>(&self, params: &ParamScope<'_, T>, x_nd: Tensor<T, 2>) -> Tensor<T, 2> {
        // Half of what the two wide products give is kept by selective recompute: their outputs are most of a block's.
        let gate_nf = self.gate.forward_as(params, Keep::Output, x_nd.clone());
        let up_nf = self.up.forward_as(params, Keep::Never, x_nd);
        self.down.forward_as(params, Keep::Last, T::swiglu(gate_nf, up_nf))
    }

    /// Whether any of its linears has an adapter.
    pub fn trains(&self) -> bool {
        self.gate.trains() || self.up.trains() || self.down.trains()
    }
}
