//! What features are functions of besides their sample and what trains below them: tensors of a checkpoint,
//! and in words everything else, as how they and activations are kept, the model's sizes, the backend.
//!
//! Weights are hashed as they lie in the mapped files, in pieces on all threads, and the hashes of the pieces
//! in the order of names: no device is read, and no weight is copied. What is kept of a weight is a function
//! of the file's bytes and the type of weights.
//!
//! What this file does not do: make the keys of samples or of namespaces.

use std::path::{Path, PathBuf};

use coxswain_feature_store::Digest;
use coxswain_models::pretrained::{checkpoint::Checkpoint, error::ModelError, rules::Rules};
use coxswain_nn::pulse;
use coxswain_task::{FrozenWeights, TaskError};
use rayon::prelude::*;

/// What the digest of weights begins with; raised whenever a kernel gives other bits than before.
const ARITHMETIC: &str = "coxswain features 1";

/// Bytes that one task hashes.
const PIECE: usize = 4 << 20;
/// Pieces between two signs of motion.
const AT_ONCE: usize = 64;

/// Everything frozen that features depend on, not read yet.
pub struct FrozenTensors {
    checkpoint: Checkpoint,
    names: Vec<String>,
    about: String,
}

impl FrozenTensors {
    /// These tensors of the checkpoint in `dir`, whose names follow `rules`; an error if it can no longer be
    /// opened. `about` is whatever else features depend on.
    pub fn from_checkpoint(
        dir: &Path,
        rules: Rules,
        names: impl Iterator<Item = String>,
        about: &str,
    ) -> Result<Self, ModelError> {
        let about = format!("{ARITHMETIC}\n{about}");
        Ok(Self { checkpoint: Checkpoint::open(dir, rules)?, names: names.collect(), about })
    }

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

impl FrozenWeights for FrozenTensors {
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
