//! A linear layer of the pretrained model: frozen, with or without a low-rank adapter, or trained itself.
//!
//! The adapter runs as two thin products beside the frozen one. Forming `W + s B A` would cost a dense weight
//! and, in the backward pass, a dense gradient; this costs `rank * (in + out)` multiplications a token.

use burn::tensor::{DType, Tensor, TensorData};

use super::plan::{AdapterSpec, LoraPlan};
use crate::{
    kernels::{Dropout, LinearLayer, LowRank, ModelBackend, Tape, VECTOR, Weight, dropout::module_word},
    params::{
        BaseWeight, Group, Init, Keep, LinearInputs, NotedLinear, ParamId, ParamScope, TrainableLayout,
    },
};

/// Where an adapter's matrices are, and how much they count.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adapter {
    a_ri: ParamId,
    b_or: ParamId,
    /// DoRA's magnitudes.
    magnitude_o: Option<ParamId>,
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
    /// `B = 0`, and with DoRA the norms of the weight's rows, with which the layer is what it was.
    pub fn register(
        module: &str,
        [inputs, outputs]: [usize; 2],
        plan: Option<&LoraPlan>,
        layout: &mut TrainableLayout,
    ) -> Option<Self> {
        let plan = plan?;
        let spec = plan.adapter(module)?;
        let matrices = Matrices { group: Group::LORA, keys: peft_keys(module), features: [inputs, outputs] };
        let mut adapter = matrices.register(spec, layout);
        adapter.magnitude_o = spec
            .dora
            .then(|| layout.add(magnitude_key(module), &[outputs], Group::LORA, false, Init::RowNorms));
        Some(Self { module: module_word(module), dropout: plan.recipe().dropout, ..adapter })
    }

    /// Registers the adapter that `plan` has for a linear that is not the pretrained model's: in a group of
    /// its own, under its own name. Such adapters drop nothing and have no magnitudes.
    pub fn register_in(
        group: Group,
        module: &str,
        features: [usize; 2],
        plan: Option<&LoraPlan>,
        layout: &mut TrainableLayout,
    ) -> Option<Self> {
        let spec = plan?.adapter(module)?;
        Some(Matrices { group, keys: matrix_keys(module), features }.register(spec, layout))
    }

    /// Two matrices in the layout.
    pub fn matrices(&self) -> [ParamId; 2] {
        [self.a_ri, self.b_or]
    }

    /// The update on a tape.
    pub fn update<T: Tape>(&self, params: &ParamScope<'_, T>) -> LowRank<T> {
        LowRank {
            a_ri: params.get::<2>(self.a_ri),
            b_or: params.get::<2>(self.b_or),
            scale: self.scale,
            dropout: self.dropout(params),
        }
    }
}

/// Where an adapter's two matrices come to be.
struct Matrices {
    group: Group,
    keys: [String; 2],
    features: [usize; 2],
}

impl Matrices {
    fn register(self, spec: &AdapterSpec, layout: &mut TrainableLayout) -> Adapter {
        let Self { group, keys: [a, b], features: [inputs, outputs] } = self;
        let init = Init::Uniform(1.0 / (inputs as f32).sqrt());
        Adapter {
            a_ri: layout.add(a, &[spec.rank, inputs], group, true, init),
            b_or: layout.add(b, &[outputs, spec.rank], group, true, Init::Zeros),
            magnitude_o: None,
            scale: spec.scale,
            module: 0,
            dropout: 0.0,
        }
    }
}

impl Adapter {
    /// None in a pass that is not for training.
    fn dropout<T: Tape>(&self, params: &ParamScope<'_, T>) -> Option<Dropout<T>> {
        let rows = params.dropout_rows().filter(|_| self.dropout > 0.0)?;
        Some(Dropout { rows, module: self.module, rate: self.dropout })
    }
}

/// The weight of such a layer, `[out, in]`: frozen, of few bits or not, or one that trains.
pub enum LinearWeight<B: ModelBackend> {
    /// For good.
    Frozen(Weight<B>),
    /// It trains.
    Trained(ParamId),
}

impl<B: ModelBackend> From<BaseWeight<B, 2>> for LinearWeight<B> {
    fn from(weight_oi: BaseWeight<B, 2>) -> Self {
        match weight_oi {
            BaseWeight::Frozen(weight_oi) => Self::Frozen(weight_oi.into()),
            BaseWeight::Trained(id) => Self::Trained(id),
        }
    }
}

/// `y = x W^T + b`, plus `s (x A^T) B^T` where the plan has an adapter for it.
pub struct LoraLinear<B: ModelBackend> {
    weight_oi: LinearWeight<B>,
    bias_o: Option<BaseWeight<B, 1>>,
    adapter: Option<Adapter>,
}

impl<B: ModelBackend> LoraLinear<B> {
    /// A weight `[out, in]` and bias, and the adapter of their module. A weight that trains has none.
    pub fn new(
        weight_oi: impl Into<LinearWeight<B>>,
        bias_o: Option<BaseWeight<B, 1>>,
        adapter: Option<Adapter>,
    ) -> Self {
        let weight_oi = weight_oi.into();
        debug_assert!(
            adapter.is_none() || matches!(weight_oi, LinearWeight::Frozen(_)),
            "a weight that trains beside its update"
        );
        Self { weight_oi, bias_o, adapter }
    }

    /// The weight without its adapter, `[out, in]`.
    pub fn weight_on_tape<T: Tape<Base = B>>(&self, params: &ParamScope<'_, T>) -> Weight<T> {
        match &self.weight_oi {
            LinearWeight::Frozen(weight_oi) => weight_oi.lifted(),
            LinearWeight::Trained(id) => params.get::<2>(*id).into(),
        }
    }

    /// Output features of a frozen weight; 0 where that trains.
    pub(super) fn outputs(&self) -> usize {
        match &self.weight_oi {
            LinearWeight::Frozen(weight_oi) => weight_oi.dims()[0],
            LinearWeight::Trained(_) => 0,
        }
    }

    /// The parameter that the weight is, if it trains.
    pub fn trained_weight(&self) -> Option<ParamId> {
        match self.weight_oi {
            LinearWeight::Frozen(_) => None,
            LinearWeight::Trained(id) => Some(id),
        }
    }

    /// Adapter, if it has one.
    pub fn adapter(&self) -> Option<&Adapter> {
        self.adapter.as_ref()
    }

    /// Whether anything of it trains.
    pub fn trains(&self) -> bool {
        self.adapter.is_some()
            || self.trained_weight().is_some()
            || self.bias_o.as_ref().is_some_and(BaseWeight::trains)
    }

    /// The type of a frozen weight, if that is of half precision.
    pub fn narrow(&self) -> Option<DType> {
        let LinearWeight::Frozen(weight_oi) = &self.weight_oi else { return None };
        weight_oi.dtype().filter(|dtype| *dtype != DType::F32)
    }

    /// What it reads of its input, on a backend that rounds at all: the type of its weight, if that is narrow
    /// and there is nothing beside it but an update that writes what it drops anyway.
    pub fn rounds_input(&self) -> Option<DType> {
        let drops = |adapter: Adapter| adapter.dropout > 0.0 && adapter.magnitude_o.is_none();
        self.narrow().filter(|_| self.adapter.is_none_or(drops))
    }

    /// A bias that trains beside an adapter. The layer's own node knows it as a constant, whose value may
    /// come from notes; its gradient comes by this one, which adds zero.
    fn beside<T: Tape<Base = B>>(&self, params: &ParamScope<'_, T>, y_no: Tensor<T, 2>) -> Tensor<T, 2> {
        let trained = self.bias_o.as_ref().filter(|bias_o| bias_o.trains() && self.adapter.is_some());
        let Some(bias_o) = trained.map(|bias_o| bias_o.on_tape(params)) else { return y_no };
        let zero_o = bias_o.clone() - T::lift(T::lower(bias_o));
        let outputs = y_no.dims()[1];
        y_no + zero_o.reshape([1, outputs])
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
        let y_no = params.noted_residual(residual_no, LinearInputs { x_ni, layer: self.on_tape(params) });
        self.beside(params, y_no)
    }

    fn on_tape<T: Tape<Base = B>>(&self, params: &ParamScope<'_, T>) -> NotedLinear<T> {
        let bias = |bias_o: &BaseWeight<B, 1>| {
            let bias_o = bias_o.on_tape(params);
            if self.adapter.is_some() { T::lift(T::lower(bias_o)) } else { bias_o }
        };
        let layer = LinearLayer {
            w_oi: self.weight_on_tape(params),
            bias_o: self.bias_o.as_ref().map(bias),
            update: self.adapter.map(|adapter| adapter.update(params)),
        };
        let magnitude_o = self.adapter.and_then(|adapter| adapter.magnitude_o);
        let magnitude_o = magnitude_o.map(|id| params.get::<1>(id));
        NotedLinear { layer, weight: self.trained_weight(), magnitude_o }
    }
}

/// All of these layers that read `x`, within a block that layer recompute runs; each [`Keep`] says what
/// becomes of an output there.
pub fn forward_all<B: ModelBackend, T: Tape<Base = B>, const N: usize>(
    params: &ParamScope<'_, T>,
    layers: [(&LoraLinear<B>, Keep); N],
    x_ni: Tensor<T, 2>,
) -> [Tensor<T, 2>; N] {
    let outputs =
        params.noted_linears(x_ni, layers.each_ref().map(|(layer, keep)| (*keep, layer.on_tape(params))));
    let mut layers = layers.into_iter();
    outputs.map(|y_no| match layers.next() {
        Some((layer, _)) => layer.beside(params, y_no),
        None => y_no,
    })
}

/// The names that PEFT gives to a module's two matrices.
pub fn peft_keys(module: &str) -> [String; 2] {
    matrix_keys(&format!("base_model.model.{module}"))
}

/// The names of a module's two matrices, where PEFT's prefix is not.
pub fn matrix_keys(module: &str) -> [String; 2] {
    ["A", "B"].map(|matrix| format!("{module}.lora_{matrix}.weight"))
}

/// The name that PEFT gives to a module's magnitudes (DoRA).
pub fn magnitude_key(module: &str) -> String {
    format!("base_model.model.{module}.lora_magnitude_vector")
}

/// The module whose magnitudes these are.
pub fn module_of_magnitudes(key: &str) -> &str {
    key.trim_start_matches("base_model.model.").trim_end_matches(".lora_magnitude_vector")
}

/// The name under which PEFT has the bias of a module that trains beside adapters, of an adapted one or
/// another.
pub fn bias_key(module: &str, adapted: bool) -> String {
    let base_layer = if adapted { ".base_layer" } else { "" };
    format!("base_model.model.{module}{base_layer}.bias")
}

/// The name under which PEFT has a tensor of a module that it saves whole.
pub fn saved_key(tensor: &str) -> String {
    format!("base_model.model.{tensor}")
}

/// A tensor of a checkpoint on a device, in the type it was read as.
///
/// cubecl pads a matrix's rows to half a kibibyte or the next power of two, which is a third of a small
/// model's weights and makes a copy of what is read as one long row. So rows lie one behind the other, unless
/// whole vectors could then not be loaded from where they begin.
pub fn frozen<B: ModelBackend, const D: usize>(mut data: TensorData, device: &B::Device) -> Tensor<B, D> {
    let (shape, dtype): ([usize; D], _) = (data.shape.dims(), data.dtype);
    let row = shape.last().map_or(0, |columns| columns * dtype.size());
    if B::ON_HOST || D < 2 || !row.is_multiple_of(VECTOR) {
        return Tensor::from_data(data, (device, dtype));
    }
    data.shape = [shape.iter().product::<usize>()].into();
    Tensor::<B, 1>::from_data(data, (device, dtype)).reshape(shape)
}
