//! Token ids of `config.json` from a tokenizer of another checkpoint.

use std::path::Path;

use coxswain_proto::{bounded, limits::MAX_TOKENIZER_BYTES};
use serde_json::{Map, Value};

use super::error::ModelError;

/// Keys of `config.json` and the tokens whose ids they hold.
pub type TokenIds<'t> = &'t [(&'t str, &'t str)];

/// Replaces the ids in `config` by those that the tokenizer at `path` gives the tokens that `token_ids`
/// names. Ids of tokens that it does not have are left as they are.
pub(crate) fn adopt(config: &mut Value, token_ids: TokenIds<'_>, path: &Path) -> Result<(), ModelError> {
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
        for (key, content) in token_ids {
            if let (Some(slot), Some(id)) = (map.get_mut(*key), id(content)) {
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
