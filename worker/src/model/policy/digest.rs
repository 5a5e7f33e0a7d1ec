//! What features are functions of besides their sample: digests for the keys of a cache, and the adapters of one moment.
//!
//! ```text
//! WeightsBelow            frozen weights below a tap, as the checkpoint has them; how they and activations are kept; the model's sizes; the backend
//! AdapterSnapshot         LoRA's values at one step: named by the cache, saved, and run again when a feature of that step is missing
//! ```
//!
//! Weights are hashed as they lie in the mapped files, in pieces on all threads, and the hashes of the pieces in the model's order: no
//! device is read, and no weight is copied. What is kept of a weight is a function of the file's bytes and
//! `model.weights_dtype`.
//!
//! What this file does not do: make the keys of samples or of spaces (`vl_cache`).

use std::{fmt, path::Path};

use coxswain_proto::vla_flow::ActivationsDtype;

use super::{Policy, Tap};
use crate::{
    kernels::{ModelBackend, Tape},
    model::qwen::{checkpoint::Checkpoint, error::ModelError, modules::frozen_tensors},
    params::{Group, TrainableLayout, Trainables},
    pulse,
};
use rayon::prelude::*;

/// What the digest of weights begins with; raised whenever a kernel gives other bits than before.
const ARITHMETIC: &str = "coxswain features 1";

/// Bytes that one task hashes.
const PIECE: usize = 4 << 20;
/// Pieces between two signs of motion.
const AT_ONCE: usize = 64;

/// A BLAKE3 hash.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Digest(pub [u8; 32]);

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

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

impl WeightsBelow {
    /// The files that are read.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        self.checkpoint.files()
    }

    /// Names what is read of the files: equal names and unchanged files have equal digests.
    pub fn name(&self) -> String {
        let mut all = blake3::Hasher::new();
        all.update(self.about.as_bytes());
        self.names.iter().for_each(|name| {
            all.update(name.as_bytes()).update(b"\n");
        });
        format!("weights {}", all.finalize().to_hex())
    }

    /// Reads the weights once more, at the speed of hashing.
    pub fn digest(&self) -> Result<Digest, ModelError> {
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

/// A saved snapshot of other adapters than this run's.
#[derive(Debug, thiserror::Error)]
#[error("`{name}` is {found}; this run's adapters have {expected:?} there")]
pub struct SnapshotError {
    /// The tensor.
    pub name: String,
    /// What the snapshot has.
    pub found: String,
    /// This run's shape.
    pub expected: Vec<usize>,
}

/// The values of all adapters at one moment.
#[derive(Clone, Debug, PartialEq)]
pub struct AdapterSnapshot {
    /// The adapters alone, where they are in the run's own layout.
    layout: TrainableLayout,
    values: Vec<f32>,
}

impl AdapterSnapshot {
    /// As they are now. Empty without adapters.
    pub fn of<B: ModelBackend>(trainables: &Trainables<B>) -> Self {
        let layout = trainables.layout().leading(Group::Lora);
        let values = trainables.leading_values(layout.len());
        Self { layout, values }
    }

    /// Trainables that hold these adapters and nothing else: enough for [`Policy::features_below`].
    pub fn trainables<B: ModelBackend>(&self, device: &B::Device) -> Trainables<B> {
        Trainables::new(self.layout.clone(), self.values.clone(), device)
    }

    /// Name, shape and values of each matrix, under PEFT's names.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, &[usize], &[f32])> {
        let params = self.layout.params().iter();
        params.map(|param| (&*param.name, &*param.shape, &self.values[param.range()]))
    }

    /// What [`AdapterSnapshot::tensors`] gave, for a run of this layout: shape and values of each matrix by its name.
    pub fn from_tensors<'a>(
        layout: &TrainableLayout,
        find: impl Fn(&str) -> Option<(&'a [usize], &'a [f32])>,
    ) -> Result<Self, SnapshotError> {
        let layout = layout.leading(Group::Lora);
        let mut values = Vec::with_capacity(layout.len());
        for param in layout.params() {
            let found = find(&param.name);
            match found {
                Some((shape, own)) if shape == param.shape => values.extend_from_slice(own),
                _ => {
                    return Err(SnapshotError {
                        name: param.name.clone(),
                        found: found.map_or("missing".into(), |(shape, _)| format!("{shape:?}")),
                        expected: param.shape.clone(),
                    });
                }
            }
        }
        Ok(Self { layout, values })
    }

    /// Bytes that it takes.
    pub fn bytes(&self) -> u64 {
        std::mem::size_of_val(&*self.values) as u64
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
