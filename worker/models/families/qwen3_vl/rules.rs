//! What names of modules and tensors mean.

use crate::pretrained::rules::{Place, Rules};

/// What names mean here: published files have the module paths of Transformers. The vision tower is not
/// quantized, nor is the head.
pub(super) const RULES: Rules = Rules {
    canonical: |name| name.to_owned(),
    place,
    packs: |module| !of_vision(module) && module != "lm_head",
};

fn of_vision(name: &str) -> bool {
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
