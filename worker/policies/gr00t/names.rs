//! What names in such a policy's file mean. They are LeRobot's own; NVIDIA's files lack what all of them
//! begin with. Where the table of tokens is stored as the head that it is tied to, it is the table.

use coxswain_models::pretrained::{
    location::FileLocation,
    rules::{Place, Rules},
};

/// Where the vision-language model is in the file, dot included.
pub(super) const BACKBONE: &str = "_groot_model.backbone.model.";
/// Where all else is.
pub(super) const HEAD: &str = "_groot_model.action_head";
/// What NVIDIA's names lack.
const OWN: &str = "_groot_model.";

/// The rules by which shared code reads the file.
pub(crate) const RULES: Rules =
    Rules { canonical, place, packs: |module| module.contains(".language_model.layers.") };

fn canonical(name: &str) -> String {
    match name.strip_prefix(OWN).unwrap_or(name) {
        "backbone.model.lm_head.weight" => format!("{BACKBONE}model.language_model.embed_tokens.weight"),
        name => format!("{OWN}{name}"),
    }
}

/// The name that LeRobot's file has for a tensor of NVIDIA's or of its own.
pub(crate) fn written(name: &str) -> String {
    if name.starts_with(OWN) { name.to_owned() } else { format!("{OWN}{name}") }
}

fn place(name: &str) -> Place {
    let Some((_, name)) = name.split_once(BACKBONE) else { return Place::Other };
    if name.starts_with("model.visual") {
        return Place::Vision(Place::number(name, "model.visual.blocks."));
    }
    let Some(name) = name.strip_prefix("model.language_model.") else {
        return if name.starts_with("lm_head") { Place::Head } else { Place::Other };
    };
    match name.split('.').next() {
        Some("embed_tokens") => Place::Table,
        Some("norm") => Place::FinalNorm,
        _ => Place::number(name, "layers.").map_or(Place::Other, Place::Layer),
    }
}

/// Whether anything reads what has this name.
pub(super) fn is_reached(name: &str) -> bool {
    !matches!(place(name), Place::FinalNorm | Place::Head)
}

/// Where the vision-language model lies, of whose decoder layers there are so many.
pub(super) fn within(layers: usize) -> FileLocation<'static> {
    FileLocation { prefix: BACKBONE, layers: Some(layers) }
}
