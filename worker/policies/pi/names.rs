//! What names in a pi0.5 policy's file mean. They are LeRobot's own; published files leave the first `model.`
//! out, and those from before pi0.5 had a name call its time's linears as pi0's.

use coxswain_models::pretrained::rules::{Place, Rules};

use crate::names::VlmNames;

/// Where PaliGemma is.
pub(crate) const VLM: VlmNames = VlmNames {
    model: concat!("model.paligemma_with_expert.", "paligemma."),
    tower: "model.vision_tower.vision_model.",
    connector: "model.multi_modal_projector.linear",
    text: "model.language_model.",
};
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
    if name.starts_with(EXPERT_HEAD) { Place::Head } else { VLM.place(name) }
}

/// Whether anything reads what has this name.
pub(super) fn is_reached(name: &str, layers: usize) -> bool {
    !name.contains(EXPERT_HEAD) && VLM.is_reached(name, layers)
}
