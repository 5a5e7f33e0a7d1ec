//! What names of modules and tensors mean.

use crate::{pretrained::rules::Rules, two_towers::reading::rules};

/// What names mean here.
///
/// Two spellings are in use: `model.layers…` and `visual…` (published files, and what Transformers 5 still
/// writes) and `model.language_model…` and `model.visual…` (module paths of Transformers 5, and PEFT's).
pub(super) const RULES: Rules = rules(canonical_name);

/// The module path of Transformers 5 for a tensor or module name in either spelling.
pub(super) fn canonical_name(name: &str) -> String {
    if name.starts_with("visual.") {
        return format!("model.{name}");
    }
    match name.strip_prefix("model.") {
        Some(rest) if !rest.starts_with("language_model.") && !rest.starts_with("visual.") => {
            format!("model.language_model.{rest}")
        }
        _ => name.to_owned(),
    }
}
