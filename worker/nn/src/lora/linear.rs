//! A frozen linear layer, with or without a low-rank adapter.
//!
//! The adapter runs as two thin products beside the frozen one. Forming `W + s B A` would cost a dense weight
//! and, in the backward pass, a dense gradient; this costs `rank * (in + out)` multiplications a token.

use burn::tensor::{DType, Tensor, TensorData};

use super::plan::LoraPlan;
use crate::{
    kernels::{Dropout, LinearLayer, LowRank, ModelBackend, Tape, dropout::module_word},
    params::{Group, Init, Keep, LinearInputs, ParamId, ParamScope, TrainableLayout},
};

/// Where an adapter's matrices are, and how much they count.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adapter {
    a_ri: ParamId,
    b_or: ParamId,
    scale: f64,
    /// What dropout drops of the module's input, and how much of it.
    module: u64,
    dropout: f64,
}

impl Adapter {
    /// Registers the adapter that `plan` has for `module`, a linear of `[inputs, outputs]` features; none if
    /// it has none.
    ///
    /// Initial values are PEFT's: `A` as `kaiming_uniform(a = sqrt 5)`, which is uniform in `±1 / sqrt(in)`,
    /// and `B = 0`.
    pub fn register(
        module: &str,
        [inputs, outputs]: [usize; 2],
        plan: Option<&LoraPlan>,
        layout: &mut TrainableLayout,
    ) -> Option<Self> {
        let plan = plan?;
        let spec = plan.adapter(module)?;
        let init = Init::Uniform(1.0 / (inputs as f32).sqrt());
        let [a, b] = peft_keys(module);
        Some(Self {
            a_ri: layout.add(a, &[spec.rank, inputs], Group::LORA, true, init),
            b_or: layout.add(b, &[outputs, spec.rank], Group::LORA, true, Init::Zeros),
            scale: spec.scale,
            module: module_word(module),
            dropout: plan.recipe().dropout,
        })
    }
}

impl Adapter {
    /// None in a pass that is not for training.
    fn dropout<T: Tape>(&self, params: &ParamScope<'_, T>) -> Option<Dropout<T>> {
        let rows = params.dropout_rows().filter(|_| self.dropout > 0.0)?;
        Some(Dropout { rows, module: self.module, rate: self.dropout })
    }
}

/// `y = x W^T + b`, plus `s (x A^T) B^T` where the plan has an adapter for it.
pub struct LoraLinear<B: ModelBackend> {
    weight_oi: Tensor<B, 2>,
    bias_o: Option<Tensor<B, 1>>,
    adapter: Option<Adapter>,
}

impl<B: ModelBackend> LoraLinear<B> {
    /// A frozen weight `[out, in]` and bias, and the adapter of their module.
    pub fn new(weight_oi: Tensor<B, 2>, bias_o: Option<Tensor<B, 1>>, adapter: Option<Adapter>) -> Self {
        Self { weight_oi, bias_o, adapter }
    }

    /// The frozen weight, `[out, in]`, shared.
    pub fn weight(&self) -> Tensor<B, 2> {
        self.weight_oi.clone()
    }

    /// Whether it has an adapter.
    pub fn trains(&self) -> bool {
        self.adapter.is_some()
    }

    /// Whether it reads nothing but its input rounded to bfloat16, on a backend that rounds at all.
    pub fn rounds_input(&self) -> bool {
        self.adapter.is_none() && self.weight_oi.dtype() == DType::BF16
    }

    /// `x [n, in]` to `[n, out]`.
    pub fn forward<T: Tape<Base = B>>(&self, params: &ParamScope<'_, T>, x_ni: Tensor<T, 2>) -> Tensor<T, 2> {
        let [y_no] = forward_all(params, [(self, Keep::Never)], x_ni);
        y_no
    }

    /// `residual + y`, the output of half a block that layer recompute runs.
    pub fn forward_residual<T: Tape<Base = B>>(
        &self,
        params: &ParamScope<'_, T>,
        residual_no: Tensor<T, 2>,
        x_ni: Tensor<T, 2>,
    ) -> Tensor<T, 2> {
        params.noted_residual(residual_no, LinearInputs { x_ni, layer: self.on_tape(params) })
    }

    fn on_tape<T: Tape<Base = B>>(&self, params: &ParamScope<'_, T>) -> LinearLayer<T> {
        LinearLayer {
            w_oi: T::lift(self.weight_oi.clone()),
            bias_o: self.bias_o.clone().map(T::lift),
            update: self.adapter.map(|adapter| LowRank {
                a_ri: params.get::<2>(adapter.a_ri),
                b_or: params.get::<2>(adapter.b_or),
                scale: adapter.scale,
                dropout: adapter.dropout(params),
            }),
        }
    }
}

/// All of these layers that read `x`, within a block that layer recompute runs; each [`Keep`] says what
/// becomes of an output there.
pub fn forward_all<B: ModelBackend, T: Tape<Base = B>, const N: usize>(
    params: &ParamScope<'_, T>,
    layers: [(&LoraLinear<B>, Keep); N],
    x_ni: Tensor<T, 2>,
) -> [Tensor<T, 2>; N] {
    params.noted_linears(x_ni, layers.map(|(layer, keep)| (keep, layer.on_tape(params))))
}

/// The names that PEFT gives to a module's two matrices.
pub fn peft_keys(module: &str) -> [String; 2] {
    ["A", "B"].map(|matrix| format!("base_model.model.{module}.lora_{matrix}.weight"))
}

/// A tensor of a checkpoint on a device, in the type it was read as.
pub fn frozen<B: ModelBackend, const D: usize>(data: TensorData, device: &B::Device) -> Tensor<B, D> {
    let dtype = data.dtype;
    Tensor::from_data(data, (device, dtype))
}
