//! What features are functions of besides their sample and the adapters: frozen weights below a tap, as the
//! checkpoint has them; how they and activations are kept; the model's sizes; the backend.
//!
//! Weights are hashed as they lie in the mapped files, in pieces on all threads, and the hashes of the pieces
//! in the model's order: no device is read, and no weight is copied. What is kept of a weight is a function
//! of the file's bytes and `model.weights_dtype`.
//!
//! What this file does not do: make the keys of samples or of namespaces (`vl_cache`).

use std::path::PathBuf;

use coxswain_nn::dtypes::ActivationsDtype;

use super::{Policy, Tap};
use coxswain_feature_store::Digest;
use coxswain_models::qwen2_5_vl::{checkpoint::Checkpoint, error::ModelError, modules::frozen_tensors};
use coxswain_nn::{kernels::Tape, pulse};
use coxswain_task::{FrozenWeights, TaskError};
use rayon::prelude::*;

/// What the digest of weights begins with; raised whenever a kernel gives other bits than before.
const ARITHMETIC: &str = "coxswain features 1";

/// Bytes that one task hashes.
const PIECE: usize = 4 << 20;
/// Pieces between two signs of motion.
const AT_ONCE: usize = 64;

/// Everything frozen that features at a tap depend on, not read yet.
pub struct WeightsBelow {
    checkpoint: Checkpoint,
    names: Vec<String>,
    /// How the weights are kept, and what computes with them.
    about: String,
}

impl<B: Tape<Base = B>> Policy<B> {
    /// What features at `tap` depend on, in the checkpoint's files; an error if they can no longer be opened.
    pub fn weights_below(&self, tap: Tap) -> Result<WeightsBelow, ModelError> {
        let Self { model, source, device, .. } = self;
        let names = frozen_tensors(&model.config).into_iter().map(|tensor| tensor.name);
        // Said only where it is not what it was before there was a choice: stores of then stay valid.
        let activations = match self.settings.retention.activations {
            ActivationsDtype::Float32 => "",
            ActivationsDtype::Bfloat16 => "activations in bfloat16\n",
        };
        Ok(WeightsBelow {
            checkpoint: Checkpoint::open(&source.dir)?,
            names: names.filter(|name| is_below(name, tap)).collect(),
            about: format!(
                "{ARITHMETIC}\n{}\n{:?}\n{:?}\n{activations}",
                B::name(device),
                source.dtype,
                model.config
            ),
        })
    }
}

impl FrozenWeights for WeightsBelow {
    fn files(&self) -> Vec<PathBuf> {
        self.checkpoint.files().map(PathBuf::from).collect()
    }

    fn name(&self) -> String {
        let mut all = blake3::Hasher::new();
        all.update(self.about.as_bytes());
        self.names.iter().for_each(|name| {
            all.update(name.as_bytes()).update(b"\n");
        });
        format!("weights {}", all.finalize().to_hex())
    }

    fn digest(&self) -> Result<Digest, TaskError> {
        self.hash().map_err(TaskError::bad_input)
    }
}

impl WeightsBelow {
    fn hash(&self) -> Result<Digest, ModelError> {
        let mut all = blake3::Hasher::new();
        all.update(self.about.as_bytes());
        let mut pieces = Vec::new();
        for name in &self.names {
            let (dtype, shape, bytes) = self.checkpoint.stored(name)?;
            all.update(format!("{name} {dtype:?} {shape:?}\n").as_bytes());
            pieces.extend(bytes.chunks(PIECE));
        }
        for pieces in pieces.chunks(AT_ONCE) {
            pulse::beat();
            let hashes: Vec<_> = pieces.par_iter().map(|piece| blake3::hash(piece)).collect();
            hashes.iter().for_each(|hash| {
                all.update(hash.as_bytes());
            });
        }
        Ok(Digest(*all.finalize().as_bytes()))
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
