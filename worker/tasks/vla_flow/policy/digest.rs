//! Which frozen weights features at a tap are functions of, and what else.

use coxswain_models::{pretrained::error::ModelError, vision_language::Tap};
use coxswain_nn::{dtypes::ActivationsDtype, kernels::Tape};

use super::Policy;
use crate::frozen::FrozenTensors;

impl<B: Tape<Base = B>> Policy<B> {
    /// What features at `tap` depend on, in the checkpoint's files; an error if they can no longer be opened.
    pub fn weights_below(&self, tap: Tap) -> Result<FrozenTensors, ModelError> {
        let Self { model, source, device, .. } = self;
        let outline = model.outline();
        let below = outline.tensors().into_iter().filter(|tensor| tap.is_above(tensor.place));
        // Said only where it is not what it was before there was a choice: stores of then stay valid.
        let activations = match self.settings.retention.activations {
            ActivationsDtype::Float32 => "",
            ActivationsDtype::Bfloat16 => "activations in bfloat16\n",
        };
        let about = format!("{}\n{:?}\n{}\n{activations}", B::name(device), source.dtype, outline.sizes);
        FrozenTensors::from_checkpoint(&source.dir, outline.rules, below.map(|tensor| tensor.name), &about)
    }
}
