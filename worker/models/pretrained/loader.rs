//! Turns tensors of a checkpoint into layers on a device, registering what trains on the way.

use std::{cell::Cell, sync::Arc};

use burn::tensor::{Bytes, Tensor, TensorData};
use coxswain_nn::dtypes::{FrozenDtype, Packing, WeightsDtype};

use super::{
    blocks::BlockWeights,
    checkpoint::{Checkpoint, kept_as},
    error::ModelError,
    trains::Trains,
};
use coxswain_nn::{
    kernels::{ModelBackend, PackedMatrix, VECTOR, Weight, quantized::QuantizedMatrix},
    lora::{
        Adapter, JoinedWeights, LoraLinear,
        linear::{LinearWeight, frozen},
    },
    params::{BaseWeight, Group, Init, ParamId, TrainableLayout},
    pulse,
};

/// Bytes handed to a device between two moments at which it has taken them over. A device copies in its own
/// time, and keeps what it was given in host memory until then: without this a fast disk would bring the
/// whole model there.
const IN_FLIGHT: usize = 256 << 20;

/// Whether a model on this backend can keep its weights so.
pub fn check_dtype<B: ModelBackend>(dtype: FrozenDtype) -> Result<(), ModelError> {
    if B::ON_HOST && dtype == FrozenDtype::Float16 {
        return Err(ModelError::Float16OnHost);
    }
    Ok(())
}

/// Whether a model on this backend can have its blocks so.
pub fn check_blocks<B: ModelBackend>(blocks: BlockWeights) -> Result<(), ModelError> {
    if blocks == BlockWeights::Sharded && !B::ON_HOST {
        return Err(ModelError::ShardedOnDevice);
    }
    Ok(())
}

/// A frozen linear layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinearShape {
    /// Path of the module; its tensors are `module.weight` and `module.bias`.
    pub module: String,
    /// Input and output features.
    pub features: [usize; 2],
    /// Whether it has a bias.
    pub bias: bool,
}

impl LinearShape {
    /// `at.name`, a linear of `features`.
    pub fn new(at: &str, name: &str, features: [usize; 2], bias: bool) -> Self {
        Self { module: format!("{at}.{name}"), features, bias }
    }

    /// Gate, up and down of the gated MLP at `at`.
    pub fn gated_mlp(at: &str, [width, inner]: [usize; 2], bias: bool) -> [Self; 3] {
        [
            Self::new(at, "mlp.gate_proj", [width, inner], bias),
            Self::new(at, "mlp.up_proj", [width, inner], bias),
            Self::new(at, "mlp.down_proj", [inner, width], bias),
        ]
    }
}

/// Layers of one input, and their weights if they lie together.
type LoadedGroup<B> = (Vec<LoraLinear<B>>, Option<JoinedWeights<B>>);

/// What all layers need while they are loaded.
pub struct Loader<'a, B: ModelBackend> {
    /// Where weights come from.
    pub checkpoint: &'a Arc<Checkpoint>,
    /// How matrices are kept.
    pub dtype: FrozenDtype,
    /// Where the weights of repeated blocks are.
    pub blocks: BlockWeights,
    /// What of it trains.
    pub trains: Trains<'a>,
    /// Where what trains is registered.
    pub layout: &'a mut TrainableLayout,
    /// Where weights go.
    pub device: &'a B::Device,
    /// Bytes that the device may not have taken over yet.
    pub in_flight: Cell<usize>,
    /// What stands before every name that is asked for, dot included: where in a policy's file a model lies.
    pub within: &'a str,
}

impl<B: ModelBackend> Loader<'_, B> {
    /// `module.weight` `[out, in]`, with `module.bias` if asked for, and its adapter.
    pub fn linear(
        &mut self,
        module: &str,
        [inputs, outputs]: [usize; 2],
        bias: bool,
    ) -> Result<LoraLinear<B>, ModelError> {
        let [weight, bias_name] = ["weight", "bias"].map(|tensor| format!("{module}.{tensor}"));
        let weight_oi = match self.trained(&weight, &[outputs, inputs]) {
            Some(id) => LinearWeight::Trained(id),
            None => LinearWeight::Frozen(self.frozen_linear(module, &weight, [outputs, inputs])?),
        };
        let bias_o = bias.then(|| self.gain(&bias_name, outputs)).transpose()?;
        let adapter = self.adapter(module, [inputs, outputs]);
        Ok(LoraLinear::new(weight_oi, bias_o, adapter))
    }

    /// The linears of one input; their weights lie together where the backend joins such layers, and these
    /// can be joined.
    pub fn group(&mut self, shapes: &[LinearShape]) -> Result<LoadedGroup<B>, ModelError> {
        let Some(joined) = self.joins(shapes).then(|| self.joined(shapes)).transpose()? else {
            let each = shapes.iter().map(|shape| self.linear(&shape.module, shape.features, shape.bias));
            return Ok((each.collect::<Result<_, _>>()?, None));
        };
        let mut row = 0;
        let each = shapes.iter().enumerate().map(|(number, shape)| {
            let LinearShape { module, features: [inputs, outputs], bias } = shape;
            let part =
                |joined: &Tensor<B, 1>, width| B::matrix_view(joined.clone(), row * width, [*outputs, width]);
            let flat = |x: &Tensor<B, 2>| x.clone().reshape([x.dims().iter().product::<usize>()]);
            let weight_oi = joined.w_oi.layer(number, |w_oi| part(&flat(w_oi), *inputs));
            let of_layer = |bias_o: &Tensor<B, 1>| part(bias_o, 1).reshape([*outputs]).into();
            let bias_o = joined.bias_o.as_ref().filter(|_| *bias).map(of_layer);
            row += outputs;
            let adapter = self.adapter(module, [*inputs, *outputs]);
            LoraLinear::new(LinearWeight::Frozen(weight_oi), bias_o, adapter)
        });
        Ok((each.collect(), Some(joined)))
    }

    /// Whether nothing of these layers trains but updates that are computed together, and their weights can
    /// lie together.
    fn joins(&self, shapes: &[LinearShape]) -> bool {
        let frozen = |LinearShape { module, bias, .. }: &LinearShape| {
            let trains = |tensor| self.group_of(&format!("{module}.{tensor}")).is_some();
            !(trains("weight") || *bias && trains("bias"))
        };
        let width = shapes[0].features[0] * self.dtype.dense().bytes() as usize;
        let alike =
            |shape: &LinearShape| shape.features[0] == shapes[0].features[0] && shape.bias == shapes[0].bias;
        let updates = |shape: &LinearShape| {
            self.trains.lora.and_then(|plan| plan.adapter(&self.full_name(&shape.module)))
        };
        let first = updates(&shapes[0]);
        let together = |shape: &LinearShape| match (first, updates(shape)) {
            (None, None) => true,
            (Some(first), Some(other)) => first.rank == other.rank && !first.dora && !other.dora,
            _ => false,
        };
        let drops = first.is_some() && self.trains.lora.is_some_and(|plan| plan.recipe().dropout > 0.0);
        // Each layer's own weight is a view, from an address that whole vectors can be loaded from.
        let aligned = width.is_multiple_of(VECTOR);
        B::joins(self.device)
            && aligned
            && !drops
            && shapes.iter().all(|shape| frozen(shape) && alike(shape) && together(shape))
    }

    /// The weights of these layers one below the other, and their biases.
    fn joined(&self, shapes: &[LinearShape]) -> Result<JoinedWeights<B>, ModelError> {
        let (dtype, inputs) = (self.dtype.dense(), shapes[0].features[0]);
        let outputs: usize = shapes.iter().map(|shape| shape.features[1]).sum();
        let matrix = |LinearShape { module, features: [inputs, outputs], .. }: &LinearShape| {
            (format!("{module}.weight"), [*outputs, *inputs])
        };
        let w_oi = match self.packing(&shapes[0].module) {
            Some(packing) => {
                let packed = |(name, shape): (String, [usize; 2])| self.packed(&name, shape, packing);
                Weight::Packed(shapes.iter().map(matrix).map(packed).collect::<Result<_, _>>()?)
            }
            None => {
                let rows = shapes.iter().map(matrix);
                let rows = rows.map(|(name, shape)| {
                    self.checkpoint.matrix(&self.full_name(&name), &shape, &shape, dtype)
                });
                self.placed(stacked(rows, [outputs, inputs], dtype)?)?.into()
            }
        };
        let bias_of = |LinearShape { module, features: [_, outputs], .. }: &LinearShape| {
            self.checkpoint.vector(&self.full_name(&format!("{module}.bias")), *outputs)
        };
        let biases = shapes[0].bias.then(|| shapes.iter().map(bias_of));
        let bias_o = biases.map(|biases| self.placed(stacked(biases, [outputs], WeightsDtype::Float32)?));
        Ok(JoinedWeights { w_oi, bias_o: bias_o.transpose()? })
    }

    /// In few bits, if that is how this module's weights are kept.
    fn frozen_linear(&self, module: &str, weight: &str, shape: [usize; 2]) -> Result<Weight<B>, ModelError> {
        match self.packing(module) {
            Some(packing) if B::unpacks(self.device) => Ok(self.packed(weight, shape, packing)?.into()),
            Some(packing) => Ok(self.checkpoint.quantized(&self.full_name(weight), shape, packing)?.into()),
            None => Ok(self.matrix(weight, shape)?.into()),
        }
    }

    /// How this module's weights are packed, if they are.
    fn packing(&self, module: &str) -> Option<Packing> {
        self.dtype.packing().filter(|_| (self.checkpoint.rules.packs)(&self.full_name(module)))
    }

    /// The weight of a linear layer in few bits on the device.
    fn packed(
        &self,
        weight: &str,
        shape: [usize; 2],
        packing: Packing,
    ) -> Result<PackedMatrix<B>, ModelError> {
        let matrix = self.checkpoint.quantized(&self.full_name(weight), shape, packing)?;
        let bytes = QuantizedMatrix::device_bytes(packing, shape) as usize;
        self.kept(bytes, matrix, |matrix| PackedMatrix::on(&matrix, self.device))
    }

    /// A bias or a gain, by the tensor's full name.
    pub fn gain(&mut self, name: &str, len: usize) -> Result<BaseWeight<B, 1>, ModelError> {
        match self.trained(name, &[len]) {
            Some(id) => Ok(BaseWeight::Trained(id)),
            None => Ok(self.vector(name, len)?.into()),
        }
    }

    /// Registers a tensor of the checkpoint under its own name, if it trains itself.
    pub fn trained(&mut self, tensor: &str, shape: &[usize]) -> Option<ParamId> {
        self.registered(tensor, shape, shape.len() > 1)
    }

    /// Registers a table whose rows are looked up, `[rows, d]`: most rows have no gradient in most steps, and
    /// weight decay would draw them to zero.
    pub fn trained_table(&mut self, tensor: &str, shape: [usize; 2]) -> Option<ParamId> {
        self.registered(tensor, &shape, false)
    }

    fn registered(&mut self, tensor: &str, shape: &[usize], decay: bool) -> Option<ParamId> {
        let group = self.group_of(tensor)?;
        Some(self.layout.add(self.full_name(tensor), shape, group, decay, Init::Pretrained))
    }

    /// The group in which a tensor trains; none if it is frozen.
    pub(super) fn group_of(&self, tensor: &str) -> Option<Group> {
        self.trains.group(&self.full_name(tensor))
    }

    /// The full name of a module or tensor.
    pub(super) fn full_name(&self, name: &str) -> String {
        format!("{}{name}", self.within)
    }

    /// Registers the adapter of a linear of these features, if it has one.
    pub fn adapter(&mut self, module: &str, features: [usize; 2]) -> Option<Adapter> {
        Adapter::register(&self.full_name(module), features, self.trains.lora, self.layout)
    }

    /// A matrix, by the tensor's full name.
    pub fn matrix(&self, name: &str, shape: [usize; 2]) -> Result<Tensor<B, 2>, ModelError> {
        self.placed(self.checkpoint.matrix(&self.full_name(name), &shape, &shape, self.dtype.dense())?)
    }

    /// A matrix in host memory: where it can be, the mapped file.
    pub fn on_host(&self, name: &str, shape: [usize; 2]) -> Result<TensorData, ModelError> {
        self.checkpoint.matrix(&self.full_name(name), &shape, &shape, self.dtype.dense())
    }

    /// A tensor of any shape in the file, as a matrix with the same elements.
    pub fn flattened(
        &self,
        name: &str,
        expected: &[usize],
        shape: [usize; 2],
    ) -> Result<Tensor<B, 2>, ModelError> {
        self.placed(self.checkpoint.matrix(&self.full_name(name), expected, &shape, self.dtype.dense())?)
    }

    /// A convolution whose stride is its kernel, as the linear map of a flattened patch that it is: its first
    /// axis are outputs.
    pub fn convolution(&mut self, name: &str, kernel: &[usize]) -> Result<BaseWeight<B, 2>, ModelError> {
        match self.trained(name, kernel) {
            Some(id) => Ok(BaseWeight::Trained(id)),
            None => Ok(self.flattened(name, kernel, [kernel[0], kernel[1..].iter().product()])?.into()),
        }
    }

    /// A vector that is frozen, by the tensor's full name.
    pub fn vector(&self, name: &str, len: usize) -> Result<Tensor<B, 1>, ModelError> {
        self.placed(self.checkpoint.vector(&self.full_name(name), len)?)
    }

    /// A tensor on the device.
    fn placed<const D: usize>(&self, data: TensorData) -> Result<Tensor<B, D>, ModelError> {
        let bytes = data.bytes.len();
        let data = if B::ON_HOST { data } else { unmapped(data) };
        self.kept(bytes, data, |data| frozen(data, self.device))
    }

    /// What `place` makes on the device, of so many bytes. Waits for the device now and then; on the CPU
    /// there is nothing to wait for.
    fn kept<I: Send, T: Send>(
        &self,
        bytes: usize,
        data: I,
        place: impl Fn(I) -> T + Send,
    ) -> Result<T, ModelError> {
        pulse::beat();
        let in_flight = self.in_flight.get() + bytes;
        // Held to the end: a device's allocator gives each exactly what it takes, not the next larger of its
        // pages.
        let tensor = B::memory_persistent_allocations(self.device, data, place);
        self.in_flight.set(in_flight);
        if in_flight >= IN_FLIGHT {
            self.in_flight.set(0);
            // cubecl lets go of what it has copied when it launches a kernel, and at no other time: this is
            // one.
            drop(Tensor::<B, 1>::zeros([1], self.device));
            B::sync(self.device).map_err(|error| ModelError::Device(error.to_string()))?;
        }
        Ok(tensor)
    }
}

/// Tensors one behind the other, as one of this shape.
fn stacked<const D: usize>(
    parts: impl Iterator<Item = Result<TensorData, ModelError>>,
    shape: [usize; D],
    dtype: WeightsDtype,
) -> Result<TensorData, ModelError> {
    let (mut bytes, elements) = (Vec::new(), shape.iter().product::<usize>());
    for part in parts {
        let part = part?.bytes;
        // There are none where there are no values.
        if !part.is_empty() {
            bytes.reserve_exact(elements * dtype.bytes() as usize - bytes.len());
        }
        bytes.extend_from_slice(&part);
    }
    Ok(TensorData { bytes: Bytes::from_bytes_vec(bytes), shape: shape.into(), dtype: kept_as(dtype) })
}

/// The data in memory of its own. cubecl stages what is a file's in page-locked memory, in pages that grow by
/// powers of four: ten gigabytes of it, for good, for an embedding table.
fn unmapped(data: TensorData) -> TensorData {
    TensorData { bytes: Bytes::from_bytes_vec(data.bytes.to_vec()), ..data }
}
