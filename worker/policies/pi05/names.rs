//! What names in a pi0.5 policy's file mean. They are LeRobot's own; published files leave the first `model.`
//! out, and those from before pi0.5 had a name call its time's linears as pi0's.

use coxswain_models::pretrained::rules::{Place, Rules};

use crate::tuning::LanguageModelAt;

/// What the names of the vision-language model's tensors begin with, before Transformers' own.
pub(super) const OF_VLM: &str = concat!("model.paligemma_with_expert.", "paligemma.");
/// Where the expert is.
pub(super) const EXPERT_AT: &str = "model.paligemma_with_expert.gemma_expert.model";
/// Its head, which nothing reads.
pub(super) const EXPERT_HEAD: &str = "model.paligemma_with_expert.gemma_expert.lm_head";

/// The rules by which shared code reads the file.
pub const RULES: Rules =
    Rules { canonical, place, packs: |module| module.contains(".language_model.layers.") };

fn canonical(name: &str) -> String {
    let name = name.strip_prefix("model.").unwrap_or(name);
    let of_time = name.strip_prefix("action_").filter(|rest| rest.starts_with("time_mlp_"));
    format!("model.{}", of_time.unwrap_or(name))
}

fn place(name: &str) -> Place {
    let Some(name) = name.strip_prefix(OF_VLM) else {
        return if name.starts_with(EXPERT_HEAD) { Place::Head } else { Place::Other };
    };
    if name.starts_with("model.vision_tower.") || name.starts_with("model.multi_modal_projector.") {
        return Place::Vision(Place::number(name, "model.vision_tower.vision_model.encoder.layers."));
    }
    if let Some(layer) = Place::number(name, "model.language_model.layers.") {
        return Place::Layer(layer);
    }
    match name {
        "model.language_model.embed_tokens.weight" => Place::Table,
        "model.language_model.norm.weight" => Place::FinalNorm,
        "lm_head.weight" => Place::Head,
        _ => Place::Other,
    }
}

/// Whether what a policy computes depends on a module of this name, or on the module that a tensor or an
/// adapter of this name is part of.
pub(super) fn is_reached(name: &str, layers: usize) -> bool {
    let vlm = LanguageModelAt { model: OF_VLM, text: "model.language_model." };
    !name.contains(EXPERT_HEAD) && vlm.is_reached(name, layers)
}

/// The one linear behind the tower.
pub fn connector() -> String {
    format!("{OF_VLM}model.multi_modal_projector.linear")
}
