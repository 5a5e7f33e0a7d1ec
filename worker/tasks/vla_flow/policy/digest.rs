//! Which frozen weights features at a tap are functions of, and what else.

use coxswain_models::qwen2_5_vl::{error::ModelError, modules::frozen_tensors};
use coxswain_nn::{dtypes::ActivationsDtype, kernels::Tape};

use super::{Policy, Tap};
use crate::frozen::FrozenTensors;

impl<B: Tape<Base = B>> Policy<B> {
    /// What features at `tap` depend on, in the checkpoint's files; an error if they can no longer be opened.
    pub fn weights_below(&self, tap: Tap) -> Result<FrozenTensors, ModelError> {
        let Self { model, source, device, .. } = self;
        let names = frozen_tensors(&model.config).into_iter().map(|tensor| tensor.name);
        // Said only where it is not what it was before there was a choice: stores of then stay valid.
        let activations = match self.settings.retention.activations {
            ActivationsDtype::Float32 => "",
            ActivationsDtype::Bfloat16 => "activations in bfloat16\n",
        };
        let about = format!("{}\n{:?}\n{:?}\n{activations}", B::name(device), source.dtype, model.config);
        FrozenTensors::open(&source.dir, names.filter(|name| is_below(name, tap)), &about)
    }
}

/// Whether features at `tap` depend on a frozen tensor.
fn is_below(name: &str, tap: Tap) -> bool {
    if name.starts_with("model.visual.") {
        return true;
    }
    match (tap, name.strip_prefix("model.language_model.layers.")) {
        (Tap::Vision, _) => false,
        (Tap::Final, _) => true,
        (Tap::Layer(end), Some(rest)) => {
            let layer = rest.split('.').next().and_then(|number| number.parse::<usize>().ok());
            layer.is_some_and(|layer| layer < end)
        }
        (Tap::Layer(_), None) => name.contains("embed_tokens"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_lies_below_a_tap_grows_with_its_depth() {
        let names = [
            "model.visual.blocks.0.attn.qkv.weight",
            "model.language_model.embed_tokens.weight",
            "model.language_model.layers.1.mlp.up_proj.weight",
            "model.language_model.layers.11.mlp.up_proj.weight",
            "model.language_model.norm.weight",
        ];
        let below = |tap| names.iter().filter(|name| is_below(name, tap)).count();
        let taps = [Tap::Vision, Tap::Layer(0), Tap::Layer(1), Tap::Layer(2), Tap::Layer(11), Tap::Final];
        assert_eq!(taps.map(below), [1, 2, 2, 3, 3, 5]);
    }
}
