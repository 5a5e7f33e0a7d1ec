//! What names of modules and tensors mean.

use coxswain_models::pretrained::rules::{Place, Rules};

/// As `config.json` names the family.
pub const MODEL_TYPE: &str = "quilt";
/// What would read it in Transformers.
pub const CLASS: &str = "QuiltForConditionalGeneration";

/// The linear from pixels of a patch to a token.
pub const PATCHES: &str = "model.vision.patches";
/// The table of token embeddings.
pub const TABLE: &str = "model.tokens";
/// The norm after the last block.
pub const NORM: &str = "model.norm";
/// The LM head.
pub const HEAD: &str = "lm_head";

/// What names mean here. Files have the canonical ones.
pub const RULES: Rules =
    Rules { canonical: str::to_owned, place, packs: |module| module != PATCHES && module != HEAD };

/// Block `index`.
pub fn layer(index: usize) -> String {
    format!("model.layers.{index}")
}

/// The name that files have for a module.
pub fn stored(name: &str) -> String {
    name.to_owned()
}

fn place(name: &str) -> Place {
    let is =
        |module: &str| name.strip_prefix(module).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'));
    if let Some(layer) = Place::number(name, "model.layers.") {
        return Place::Layer(layer);
    }
    let places = [
        (PATCHES, Place::Vision(None)),
        (TABLE, Place::Table),
        (NORM, Place::FinalNorm),
        (HEAD, Place::Head),
    ];
    places.into_iter().find(|(module, _)| is(module)).map_or(Place::Other, |(_, place)| place)
}
