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
        remedy: match dir.join("adapter_config.json").exists() {
            true => "the directory is a PEFT adapter: set `lora.init_from` to it, and `model.path` to its base model",
            false => "name a Hugging Face directory of a pretrained model",
        },
    })?;
    let json =
        serde_json::from_str(&text).map_err(|source| ModelError::Json { path: path.clone(), source })?;
    Ok((path, json))
}

/// The file, and the `model_type` that it names.
pub fn model_type(dir: &Path) -> Result<(PathBuf, String), ModelError> {
    let (path, json) = read(dir)?;
    let fields = Fields::new(&path, &json)?;
    fields.expect_pretrained("a supported model")?;
    let found = fields.str("model_type")?.map(str::to_owned);
    let found =
        found.ok_or_else(|| fields.error("model_type", "missing; use the checkpoint's own config.json"))?;
    Ok((path, found))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn quantised_weights_are_named_with_the_way_and_policies_as_what_they_are() {
        for (config, told) in [
            (
                json!({"model_type": "qwen2_5_vl", "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": true}}),
                ["quantised weights (bitsandbytes)", "`model.weights_dtype: nf4` (or `int8`) quantises it"],
            ),
            (
                json!({"model_type": "qwen2_5_vl", "quantization_config": {"quant_method": "awq"}}),
                ["quantised weights (awq)", "use the checkpoint that they were made from"],
            ),
            (json!({"type": "act"}), ["`type`: \"act\"", "a LeRobot policy"]),
        ] {
            let dir = tempfile::tempdir().expect("a directory");
            // As Windows' programs save it.
            std::fs::write(dir.path().join("config.json"), format!("\u{feff}{config}")).expect("written");
            let message = model_type(dir.path()).expect_err("refused").to_string();
            assert!(told.iter().all(|part| message.contains(part)), "{message}");
        }
    }
}
