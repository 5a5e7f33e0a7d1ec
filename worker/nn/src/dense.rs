//! A trainable linear layer: two entries of the flat parameter buffer and their product with an input. Or a
//! constant one, which may have a low-rank adapter.

use burn::tensor::Tensor;

use crate::{
    kernels::{LinearLayer, Tape},
    lora::{Adapter, LoraPlan},
    params::{Group, Init, Keep, LinearInputs, NotedLinear, ParamId, ParamScope, TrainableLayout},
};

/// `y = x w^T + b`, both trained, or both constants.
#[derive(Clone, Copy, Debug)]
pub struct Dense {
    weight: ParamId,
    bias: Option<ParamId>,
    adapter: Option<Adapter>,
}

/// Sizes and initial values of a [`Dense`].
#[derive(Clone, Copy, Debug)]
pub struct DenseShape {
    /// Input features.
    pub inputs: usize,
    /// Output features.
    pub outputs: usize,
    /// Initial values of the weight; the bias starts at zero.
    pub init: Init,
    /// Whether there is a bias.
    pub bias: bool,
}

impl DenseShape {
    /// With a bias, and Xavier's uniform bound, which keeps the variance of activations and of gradients
    /// alike.
    pub fn xavier(inputs: usize, outputs: usize) -> Self {
        let bound = (6.0 / (inputs + outputs) as f32).sqrt();
        Self { inputs, outputs, init: Init::Uniform(bound), bias: true }
    }

    /// With a bias, all zero.
    pub fn zeros(inputs: usize, outputs: usize) -> Self {
        Self { inputs, outputs, init: Init::Zeros, bias: true }
    }

    /// This shape without a bias.
    pub fn without_bias(self) -> Self {
        Self { bias: false, ..self }
    }

    /// This shape with normal initial values.
    pub fn normal(self, std: f32) -> Self {
        Self { init: Init::Normal(std), ..self }
    }
}

impl Dense {
    /// Adds `{name}.weight` `[outputs, inputs]` and `{name}.bias` `[outputs]` to the layout.
    pub fn register(layout: &mut TrainableLayout, group: Group, name: &str, shape: DenseShape) -> Self {
        let weight_name = format!("{name}.weight");
        let weight = layout.add(weight_name, &[shape.outputs, shape.inputs], group, true, shape.init);
        let bias = shape
            .bias
            .then(|| layout.add(format!("{name}.bias"), &[shape.outputs], group, false, Init::Zeros));
        Self { weight, bias, adapter: None }
    }

    /// Adds the tensors of a layer as constants, whose values are brought, and the adapter that `plan` has
    /// for them as a trainable.
    pub fn register_constant(
        layout: &mut TrainableLayout,
        group: Group,
        name: &str,
        shape: DenseShape,
        plan: Option<&LoraPlan>,
    ) -> Self {
        let DenseShape { inputs, outputs, .. } = shape;
        let weight = layout.add_constant(format!("{name}.weight"), &[outputs, inputs], group);
        let bias = shape.bias.then(|| layout.add_constant(format!("{name}.bias"), &[outputs], group));
        let adapter = Adapter::register_in(group, name, [inputs, outputs], plan, layout);
        Self { weight, bias, adapter }
    }

    /// Adds the tensors as constants, with an adapter as the pretrained model's linears have it: of the group
    /// `lora`, under PEFT's names. Without magnitudes.
    pub fn register_adapted(
        layout: &mut TrainableLayout,
        group: Group,
        name: &str,
        shape: DenseShape,
        plan: &LoraPlan,
    ) -> Self {
        let constant = Self::register_constant(layout, group, name, shape, None);
        let adapter = Adapter::register(name, [shape.inputs, shape.outputs], Some(plan), layout);
        Self { adapter, ..constant }
    }

    /// Whether anything of it trains.
    pub fn trains(&self) -> bool {
        self.adapter.is_some() || matches!(self.weight, ParamId::Trained(_))
    }

    /// The product. `x_ni`; returns `[n, o]`.
    pub fn apply<T: Tape>(&self, params: &ParamScope<'_, T>, x_ni: Tensor<T, 2>) -> Tensor<T, 2> {
        let Some(adapter) = &self.adapter else { return params.linear(x_ni, self.weight, self.bias) };
        let [y_no] = params.noted_linears(x_ni, [(Keep::Never, self.adapted(params, adapter))]);
        y_no
    }

    /// `residual` plus the product: the output of half a block.
    pub fn apply_residual<T: Tape>(
        &self,
        params: &ParamScope<'_, T>,
        residual_no: Tensor<T, 2>,
        x_ni: Tensor<T, 2>,
    ) -> Tensor<T, 2> {
        match &self.adapter {
            None => params.linear_residual(residual_no, x_ni, self.weight, self.bias),
            Some(adapter) => {
                let layer = self.adapted(params, adapter);
                params.noted_residual(residual_no, LinearInputs { x_ni, layer })
            }
        }
    }

    fn adapted<T: Tape>(&self, params: &ParamScope<'_, T>, adapter: &Adapter) -> NotedLinear<T> {
        let bias_o = self.bias.map(|bias| params.get::<1>(bias));
        let update = Some(adapter.update(params));
        NotedLinear::from(LinearLayer { w_oi: params.get::<2>(self.weight).into(), bias_o, update })
    }
}
