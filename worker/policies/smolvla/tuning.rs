//! What of a policy trains: linears that have adapters, by PEFT's targets, and modules in full.
//!
//! ```text
//! run file               adapters           in full
//! neither                none               the expert and the projections, as LeRobot by default
//! model.train            none               the same and what its patterns mean
//! lora                   what targets mean  nothing, as LeRobot's own training with PEFT
//! lora and model.train   what targets mean  what the patterns mean
//! ```
//!
//! With `train_expert_only: false` in config.json the default has connector, table and all decoder layers of
//! the language model but the last, too.
//!
//! Modules are called as in the policy's file, which are the names that PEFT has for them above LeRobot's
//! class. Of the last decoder layer nothing but keys and values is read, of the language model no norm behind
//! it and no head: modules that nothing reads do not train in full, and an adapter there stays as it began.
//! The vision tower does not train.

use std::path::Path;

use coxswain_models::{
    joint::{JointOutline, outline::NamedShape},
    pretrained::{
        adapters::{HeadAdapter, TunedModules},
        checkpoint::Checkpoint,
        error::ModelError,
        rules::Place,
    },
};
use coxswain_nn::lora::{Bias, Lora, LoraError, LoraTargets, Module, ModuleKind};

use super::{
    config::SmolVlaConfig,
    names::{EXPERT_AT, RULES, connector, is_reached},
};

/// What LeRobot's own training with PEFT adapts where it is not told.
const TARGETS: &str = concat!(
    r"(model\.vlm_with_expert\.lm_expert\..*\.(q|v)_proj|",
    r"model\.(state_proj|action_in_proj|action_out_proj|action_time_mlp_in|action_time_mlp_out))"
);
/// What trains by default, as patterns of `model.train`: the expert, projections, the state's, and some of
/// what `train_expert_only: false` adds.
const OWN: [&str; 2] = ["lm_expert", r"model\.action_(in_proj|out_proj|time_mlp_in|time_mlp_out)"];
const STATE: &str = r"model\.state_proj";
const VLM: &str = r"vlm\.model\.(connector|text_model\.embed_tokens)";
/// Why the vision tower does neither.
const FROZEN_TOWER: &str = "part of the vision tower, which cannot be trained here; write an expression that excludes it, \
                            for instance `.*lm_expert.*` or `.*text_model.*`";

/// What a run file asks for.
#[derive(Clone, Copy, Debug, Default)]
pub struct TuningSettings<'s> {
    /// The section `lora`.
    pub lora: Option<&'s Lora>,
    /// `model.train`.
    pub train: &'s [String],
}

/// What trains of the policy in `dir` beside such a language model.
pub fn tuned(
    dir: &Path,
    config: &SmolVlaConfig,
    vlm: &JointOutline,
    asked: TuningSettings<'_>,
) -> Result<TunedModules, ModelError> {
    let modules = modules(dir, config, vlm);
    let lora = asked.lora.map(with_targets);
    let own = OWN.into_iter().chain(config.trains.state.then_some(STATE));
    let last = vlm.layers.saturating_sub(1);
    let below = format!(r"vlm\.model\.text_model\.layers\.(?!{last}\.)\d+");
    let of_vlm = [Some(VLM), (last > 0).then_some(&*below)].into_iter().flatten();
    let default = own.chain(of_vlm.filter(|_| config.trains.vlm)).map(str::to_owned);
    let patterns: Vec<String> =
        default.filter(|_| lora.is_none()).chain(asked.train.iter().cloned()).collect();
    let reached = |module: &Module| is_reached(&module.name, vlm.layers);
    let tuned =
        TunedModules::resolve_reached(lora.as_ref(), &patterns, &modules, &reached, HeadAdapter::Taken)?;
    let refuse =
        |field: &str, problem: String| Err(LoraError::Setting { field: field.into(), problem }.into());
    if lora.is_some_and(|lora| lora.bias == Bias::All) {
        return refuse("lora.bias", "is `all`, but those of the vision tower cannot be trained here".into());
    }
    let plan = tuned.trains().lora;
    let adapted = plan.into_iter().flat_map(|plan| plan.adapters()).map(|(name, _)| ("lora.targets", name));
    for (field, name) in adapted.chain(tuned.full.iter().map(|name| ("model.train", name))) {
        match (RULES.place)(&format!("{name}.weight")) {
            Place::Vision(_) if name != connector() => {
                return refuse(field, format!("matches `{name}`, {FROZEN_TOWER}"));
            }
            Place::Head => {
                let why =
                    "which gets no gradient from the action loss, so it would never train; leave it out";
                return refuse(field, format!("matches `{name}`, {why}"));
            }
            _ => {}
        }
    }
    Ok(tuned)
}

/// The section, with LeRobot's targets where it has none.
pub fn with_targets(lora: &Lora) -> Lora {
    let mut lora = lora.clone();
    if lora.targets == LoraTargets::default() {
        lora.targets = LoraTargets::Regex(TARGETS.into());
    }
    lora
}

/// All modules of the policy in `dir` that have weights, in the order of the file's tensors.
pub fn modules(dir: &Path, config: &SmolVlaConfig, vlm: &JointOutline) -> Vec<Module> {
    let own = config.own_tensors(vlm, expert_inner(dir));
    let tensors: Vec<&NamedShape> = vlm.tensors.iter().chain(&own).collect();
    let has = |name: &str| tensors.iter().any(|(tensor, _)| tensor == name);
    let module = |(tensor, shape): &&NamedShape| {
        let name = tensor.strip_suffix(".weight")?;
        let bias = has(&format!("{name}.bias"));
        let kind = match shape[..] {
            [rows, width] if name.ends_with("embed_tokens") || name.ends_with("position_embedding") => {
                ModuleKind::Embedding { rows, width, tied: false }
            }
            [outputs, inputs] => {
                ModuleKind::Linear { inputs, outputs, bias, head: name.ends_with("lm_head") }
            }
            [outputs, channels, height, width] => {
                ModuleKind::Convolution { shape: [outputs, channels, 1, height, width], bias }
            }
            [width] => ModuleKind::Norm { width, bias },
            _ => ModuleKind::Other,
        };
        Some(Module { name: name.into(), old_name: name.into(), kind })
    };
    tensors.iter().filter_map(module).collect()
}

/// Width of the expert's MLP, which no key says: by the header of the weights. Plans are made without them,
/// too.
pub(super) fn expert_inner(dir: &Path) -> Option<usize> {
    let gate = format!("{EXPERT_AT}.layers.0.mlp.gate_proj.weight");
    let checkpoint = Checkpoint::open(dir, RULES).ok()?;
    checkpoint.stored(&gate).ok()?.1.first().copied()
}
