//! `config.json` of a model directory, read before its family is known.

use std::path::{Path, PathBuf};

use coxswain_proto::{bounded, limits::MAX_METADATA_BYTES};
use serde_json::Value;

use super::{error::ModelError, fields::Fields};

/// The file, and what it holds.
pub fn read(dir: &Path) -> Result<(PathBuf, Value), ModelError> {
    let path = dir.join("config.json");
    let text = bounded::read_text(&path, MAX_METADATA_BYTES).map_err(|source| ModelError::Io {
        path: path.clone(),
        source,
        remedy: "name a Hugging Face directory of a pretrained model",
    })?;
    let json =
        serde_json::from_str(&text).map_err(|source| ModelError::Json { path: path.clone(), source })?;
    Ok((path, json))
}

/// The file, and the `model_type` that it names.
pub fn model_type(dir: &Path) -> Result<(PathBuf, String), ModelError> {
    let (path, json) = read(dir)?;
    let fields = Fields::new(&path, &json)?;
    fields.expect_pretrained("such a model")?;
    let found = fields.str("model_type")?.map(str::to_owned);
    let found =
        found.ok_or_else(|| fields.error("model_type", "missing; use the checkpoint's own config.json"))?;
    Ok((path, found))
}
