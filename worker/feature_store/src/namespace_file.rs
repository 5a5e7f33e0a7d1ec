//! `space.json`: what all records of a namespace share, in words. The namespace's key is a digest of exactly
//! these ingredients.

use std::{fs, path::Path};

use coxswain_proto::run_spec::CacheDtype;
use serde::{Deserialize, Serialize};

use super::{
    codec,
    digest::{Digest, Hasher, NamespaceKey},
    error::StoreError,
    usage::{self, FORMAT},
};

/// Everything that a feature depends on, besides its sample. A change of any of them makes another namespace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ingredients {
    /// Frozen weights below the tap.
    pub weights: Digest,
    /// The adapter below the tap ([`adapter_digest`](super::adapter_digest)); none if nothing trainable lies
    /// there.
    pub adapter: Option<Digest>,
    /// How images become the model's input: resampling, bounds of pixels, normalisation, patches.
    pub preprocessing: String,
    /// The prompt's template.
    pub prompt: String,
    /// The tokenizer.
    pub tokenizer: Digest,
    /// What computes: version of the computation, and kind of device, since another kind's bits differ.
    pub compute: String,
}

/// A namespace, described.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NamespaceDescription {
    /// Where features are taken, with pre- or post-norm: `final, after the norm`.
    pub tap: String,
    /// How values are stored.
    pub dtype: CacheDtype,
    /// Values of one token.
    pub width: u32,
    /// What the features depend on.
    pub ingredients: Ingredients,
    /// The run that makes it. Not part of the key: others may use and extend it.
    pub made_by: String,
}

impl NamespaceDescription {
    /// The namespace's name.
    pub fn key(&self) -> NamespaceKey {
        let Self { tap, dtype, width, ingredients, made_by: _ } = self;
        let Ingredients { weights, adapter, preprocessing, prompt, tokenizer, compute } = ingredients;
        let mut hash = Hasher::new("coxswain vl cache space v1");
        hash.named("format", &FORMAT.to_le_bytes());
        hash.named("tap", tap.as_bytes());
        hash.named("dtype", &codec::code(*dtype).to_le_bytes());
        hash.named("width", &width.to_le_bytes());
        hash.named("weights", &weights.0);
        hash.named("adapter", adapter.as_ref().map_or(&[], |adapter| &adapter.0));
        hash.named("preprocessing", preprocessing.as_bytes());
        hash.named("prompt", prompt.as_bytes());
        hash.named("tokenizer", &tokenizer.0);
        hash.named("compute", compute.as_bytes());
        NamespaceKey(hash.finish())
    }
}

/// The file: the description, and what the directory's name stands for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct File {
    format: u64,
    key: Digest,
    #[serde(flatten)]
    description: NamespaceDescription,
}

/// Writes the description of the namespace in `dir`, whole or not at all. It is on disk before anything that
/// it describes ([`sync`]), so beginning a namespace waits for no disk.
pub(super) fn write(dir: &Path, description: &NamespaceDescription) -> Result<(), StoreError> {
    let file = File { format: FORMAT.into(), key: description.key().0, description: description.clone() };
    usage::place_json(&dir.join(NAME), &file)
}

/// Brings the description of the namespace in `dir` to the disk; its name follows with the directory.
pub(super) fn sync(dir: &Path) -> Result<(), StoreError> {
    let path = dir.join(NAME);
    fs::File::open(&path).and_then(|file| file.sync_all()).map_err(StoreError::io("sync", &path))
}

/// Reads and checks the description of the namespace in `dir`; none if there is no such file.
pub(super) fn read(dir: &Path) -> Result<Option<(NamespaceKey, NamespaceDescription)>, StoreError> {
    let path = dir.join(NAME);
    let Some(value) = usage::read_json(&path)? else { return Ok(None) };
    usage::check_format(&path, &value)?;
    let foreign = |detail: String| StoreError::Foreign { path: path.clone(), detail };
    let file: File = serde_json::from_value(value).map_err(|error| {
        foreign(format!("is not a description of a namespace: {error}; remove the directory"))
    })?;
    let key = file.description.key();
    if key.0 != file.key {
        let detail = format!("its key {} is not its ingredients' hash {key}; remove the directory", file.key);
        return Err(foreign(detail));
    }
    Ok(Some((key, file.description)))
}

const NAME: &str = "space.json";
