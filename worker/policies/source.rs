//! Where a policy's own weights come from.

use coxswain_models::{
    joint::LayerSource,
    pretrained::{error::ModelError, loader::Loader},
};
use coxswain_nn::{
    kernels::Tape,
    lora::{LoraLinear, TrainedModules, linear::LinearWeight},
    params::{BaseWeight, Init, ParamId},
};

use crate::groups::EXPERT;

/// The expert's weights and the projections. What trains of them in full is in the group of action experts,
/// under the names of the file.
pub(crate) struct ExpertSource<'l, 'a, B: Tape<Base = B>> {
    pub loader: &'l mut Loader<'a, B>,
    pub full: &'l TrainedModules,
}

impl<B: Tape<Base = B>> ExpertSource<'_, '_, B> {
    fn trained(&mut self, name: String, shape: &[usize]) -> ParamId {
        self.loader.layout.add(name, shape, EXPERT, shape.len() > 1, Init::Pretrained)
    }

    /// A tensor of two axes or more, by its full name, as a matrix of as many rows as the first has.
    pub fn table(&mut self, name: &str, shape: &[usize]) -> Result<BaseWeight<B, 2>, ModelError> {
        if self.full.trains(name) {
            return Ok(BaseWeight::Trained(self.trained(name.into(), shape)));
        }
        let rows = shape[0];
        let columns = shape[1..].iter().product();
        Ok(self.loader.flattened(name, shape, [rows, columns])?.into())
    }
}

impl<B: Tape<Base = B>> LayerSource<B> for ExpertSource<'_, '_, B> {
    fn linear(
        &mut self,
        module: &str,
        [inputs, outputs]: [usize; 2],
        bias: bool,
    ) -> Result<LoraLinear<B>, ModelError> {
        if !self.full.contains(module) {
            return self.loader.linear(module, [inputs, outputs], bias);
        }
        let weight = LinearWeight::Trained(self.trained(format!("{module}.weight"), &[outputs, inputs]));
        let bias = bias.then(|| BaseWeight::Trained(self.trained(format!("{module}.bias"), &[outputs])));
        Ok(LoraLinear::new(weight, bias, None))
    }

    fn gain(&mut self, name: &str, len: usize) -> Result<BaseWeight<B, 1>, ModelError> {
        if !self.full.trains(name) {
            return self.loader.gain(name, len);
        }
        Ok(BaseWeight::Trained(self.trained(name.into(), &[len])))
    }
}
