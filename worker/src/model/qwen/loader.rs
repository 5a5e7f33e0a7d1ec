//! Turns tensors of a checkpoint into layers on a device, registering adapters on the way.

use burn::tensor::Tensor;
use coxswain_proto::run_spec::WeightsDtype;

use super::{checkpoint::Checkpoint, error::ModelError};
use crate::{
    kernels::ModelBackend,
    lora::{LoraLinear, LoraPlan, linear::frozen},
    params::TrainableLayout,
};

/// What all layers need while they are loaded.
pub struct Loader<'a, B: ModelBackend> {
    /// Where weights come from.
    pub checkpoint: &'a Checkpoint,
    /// How matrices are kept.
    pub dtype: WeightsDtype,
    /// Which linears have adapters.
    pub lora: Option<&'a LoraPlan>,
    /// Where adapters are registered.
    pub layout: &'a mut TrainableLayout,
    /// Where weights go.
    pub device: &'a B::Device,
}

impl<B: ModelBackend> Loader<'_, B> {
    /// `module.weight` `[out, in]`, with `module.bias` if asked for, and its adapter.
    pub fn linear(
        &mut self,
        module: &str,
        [inputs, outputs]: [usize; 2],
        bias: bool,
    ) -> Result<LoraLinear<B>, ModelError> {
        let weight_oi = self.matrix(&format!("{module}.weight"), [outputs, inputs])?;
        let bias_o = bias.then(|| self.vector(&format!("{module}.bias"), outputs)).transpose()?;
        Ok(LoraLinear::new(module, weight_oi, bias_o, self.lora, self.layout))
    }

    /// A matrix, by the tensor's full name.
    pub fn matrix(&self, name: &str, shape: [usize; 2]) -> Result<Tensor<B, 2>, ModelError> {
        Ok(frozen(self.checkpoint.matrix(name, &shape, &shape, self.dtype)?, self.device))
    }

    /// A tensor of any shape in the file, as a matrix with the same elements.
    pub fn flattened(
        &self,
        name: &str,
        expected: &[usize],
        shape: [usize; 2],
    ) -> Result<Tensor<B, 2>, ModelError> {
        Ok(frozen(self.checkpoint.matrix(name, expected, &shape, self.dtype)?, self.device))
    }

    /// A bias or a gain, by the tensor's full name.
    pub fn vector(&self, name: &str, len: usize) -> Result<Tensor<B, 1>, ModelError> {
        Ok(frozen(self.checkpoint.vector(name, len)?, self.device))
    }
}
