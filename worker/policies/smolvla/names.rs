//! What names in a SmolVLA policy's file mean. They are LeRobot's own.

use coxswain_models::pretrained::rules::{Place, Rules};

use crate::names::VlmNames;

/// Where the vision-language model is.
pub(crate) const VLM: VlmNames = VlmNames {
    model: "model.vlm_with_expert.vlm.",
    tower: "model.vision_model.",
    connector: "model.connector.modality_projection.proj",
    text: "model.text_model.",
};
/// Where the expert is.
pub(super) const EXPERT_AT: &str = "model.vlm_with_expert.lm_expert";

/// The rules by which shared code reads the file.
pub const RULES: Rules =
    Rules { canonical: str::to_owned, place, packs: |module| module.contains(".text_model.layers.") };

fn place(name: &str) -> Place {
    VLM.place(name)
}

/// Whether anything reads what has this name.
pub(super) fn is_reached(name: &str, layers: usize) -> bool {
    VLM.is_reached(name, layers)
}
