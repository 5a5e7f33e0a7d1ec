//! What names of modules and tensors mean.

use crate::pretrained::rules::{Place, Rules};

/// What names mean here.
///
/// Two spellings are in use: `model.layers…` and `visual…` (published files, and what Transformers 5 still
/// writes) and `model.language_model…` and `model.visual…` (module paths of Transformers 5, and PEFT's).
/// The vision tower is not quantized, nor is the head.
pub(super) const RULES: Rules =
    Rules { canonical: canonical_name, place, packs: |module| !of_vision(module) && module != "lm_head" };

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

/// Whether it is part of the vision tower.
pub(super) fn of_vision(name: &str) -> bool {
    name.starts_with("model.visual")
}

fn place(name: &str) -> Place {
    if of_vision(name) {
        return Place::Vision(Place::number(name, "model.visual.blocks."));
    }
    if let Some(layer) = Place::number(name, "model.language_model.layers.") {
        return Place::Layer(layer);
    }
    match name.strip_prefix("model.language_model.").unwrap_or(name).split('.').next() {
        Some("embed_tokens") => Place::Table,
        Some("norm") => Place::FinalNorm,
        Some("lm_head") => Place::Head,
        _ => Place::Other,
    }
}
