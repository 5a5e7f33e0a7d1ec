//! What names in a SmolVLA policy's file mean. They are LeRobot's own.

use coxswain_models::pretrained::rules::{Place, Rules};

use crate::tuning::LanguageModelAt;

/// What the names of the language model's tensors begin with, before Transformers' own.
pub(super) const OF_VLM: &str = "model.vlm_with_expert.vlm.";
/// Where the expert is.
pub(super) const EXPERT_AT: &str = "model.vlm_with_expert.lm_expert";

/// The rules by which shared code reads the file.
pub const RULES: Rules =
    Rules { canonical: str::to_owned, place, packs: |module| module.contains(".text_model.layers.") };

fn place(name: &str) -> Place {
    let Some(name) = name.strip_prefix(OF_VLM) else { return Place::Other };
    if name.starts_with("model.vision_model.") || name.starts_with("model.connector.") {
        return Place::Vision(Place::number(name, "model.vision_model.encoder.layers."));
    }
    if let Some(layer) = Place::number(name, "model.text_model.layers.") {
        return Place::Layer(layer);
    }
    match name {
        "model.text_model.embed_tokens.weight" => Place::Table,
        "model.text_model.norm.weight" => Place::FinalNorm,
        "lm_head.weight" => Place::Head,
        _ => Place::Other,
    }
}

/// Whether what a policy computes depends on a module of this name, or on the module that a tensor or an
/// adapter of this name is part of.
pub(super) fn is_reached(name: &str, layers: usize) -> bool {
    LanguageModelAt { model: OF_VLM, text: "model.text_model." }.is_reached(name, layers)
}

/// The connector's one linear.
pub fn connector() -> String {
    format!("{OF_VLM}model.connector.modality_projection.proj")
}
