//! What names of modules and tensors mean.

use coxswain_models::pretrained::rules::{Place, Rules};

/// As `config.json` names the family.
pub const MODEL_TYPE: &str = "mosaic";
/// What would read it in Transformers.
pub const CLASS: &str = "MosaicForConditionalGeneration";

/// The linear from pixels of a patch to a token.
pub const PATCHES: &str = "model.stones.cut";
/// The table of token embeddings.
pub const TABLE: &str = "model.words";
/// The norm after the last block.
pub const NORM: &str = "model.polish";
/// The LM head.
pub const HEAD: &str = "lm_head";

/// What names mean here. Files leave out how most canonical ones begin.
pub const RULES: Rules = Rules { canonical, place, packs: |module| module != PATCHES && module != HEAD };

/// Block `index`.
pub fn layer(index: usize) -> String {
    format!("model.courses.{index}")
}

/// How canonical names begin, but for the head's.
const MODEL: &str = "model.";

/// The name that files have for a module.
pub fn stored(name: &str) -> String {
    name.trim_start_matches(MODEL).to_owned()
}

fn canonical(name: &str) -> String {
    let is_whole = name.starts_with(MODEL) || name.starts_with(HEAD);
    if is_whole { name.to_owned() } else { format!("{MODEL}{name}") }
}

fn place(name: &str) -> Place {
    let is =
        |module: &str| name.strip_prefix(module).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'));
    if let Some(layer) = Place::number(name, "model.courses.") {
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
