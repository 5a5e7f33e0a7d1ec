//! What names in such a policy's file mean. They are LeRobot's own; published files leave the first `model.`
//! out, and some call the time's linears as the other policy's are called.

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
/// The expert's head, which nothing reads.
pub(super) const EXPERT_HEAD: &str = "model.paligemma_with_expert.gemma_expert.lm_head";

/// Which of both policies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PiKind {
    /// pi0.
    Pi0,
    /// pi0.5.
    Pi05,
}

impl PiKind {
    /// The rules by which shared code reads the file.
    pub fn rules(self) -> Rules {
        let canonical: fn(&str) -> String = match self {
            Self::Pi0 => |name| renamed(name, "action_"),
            Self::Pi05 => |name| renamed(name, ""),
        };
        Rules { canonical, place, packs: |module| module.contains(".language_model.layers.") }
    }
}

/// The time's linears are those of the policy where this is before their name.
fn renamed(name: &str, before: &str) -> String {
    let name = name.strip_prefix("model.").unwrap_or(name);
    let of_time = name.strip_prefix("action_").unwrap_or(name);
    if of_time.starts_with("time_mlp_") {
        format!("model.{before}{of_time}")
    } else {
        format!("model.{name}")
    }
}

fn place(name: &str) -> Place {
    if name.starts_with(EXPERT_HEAD) { Place::Head } else { VLM.place(name) }
}

/// Whether anything reads what has this name.
pub(super) fn is_reached(name: &str, layers: usize) -> bool {
    !name.contains(EXPERT_HEAD) && VLM.is_reached(name, layers)
}
