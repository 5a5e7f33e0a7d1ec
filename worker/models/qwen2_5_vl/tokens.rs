//! Token ids of `config.json` from a tokenizer of another checkpoint.

use std::path::Path;

use coxswain_proto::{bounded, limits::MAX_TOKENIZER_BYTES};
use serde_json::{Map, Value};

use super::error::ModelError;

/// Keys of `config.json` and the tokens that they name.
const IDS: [(&str, &str); 6] = [
    ("image_token_id", "<|image_pad|>"),
    ("video_token_id", "<|video_pad|>"),
    ("vision_start_token_id", "<|vision_start|>"),
    ("vision_end_token_id", "<|vision_end|>"),
    ("eos_token_id", "<|im_end|>"),
    ("bos_token_id", "<|endoftext|>"),
];

/// Replaces the ids in `config` by those that the tokenizer at `path` gives the same tokens. Ids of tokens
/// that it does not have are left as they are.
pub(super) fn adopt(config: &mut Value, path: &Path) -> Result<(), ModelError> {
    let remedy = "name a directory with a fast tokenizer";
    let text = bounded::read(path, MAX_TOKENIZER_BYTES).map_err(|source| ModelError::Io {
        path: path.into(),
        source,
        remedy,
    })?;
    let json: Value =
        serde_json::from_slice(&text).map_err(|source| ModelError::Json { path: path.into(), source })?;
    let added = json.get("added_tokens").and_then(Value::as_array).cloned().unwrap_or_default();
    let id = |content: &str| {
        let found = added.iter().find(|token| token.get("content").and_then(Value::as_str) == Some(content));
        found.and_then(|token| token.get("id")).cloned()
    };
    let replace = |map: &mut Map<String, Value>| {
        for (key, content) in IDS {
            if let (Some(slot), Some(id)) = (map.get_mut(key), id(content)) {
                *slot = id;
            }
        }
    };
    if let Some(map) = config.as_object_mut() {
        replace(map);
        if let Some(text) = map.get_mut("text_config").and_then(Value::as_object_mut) {
            replace(text);
        }
    }
    Ok(())
}
