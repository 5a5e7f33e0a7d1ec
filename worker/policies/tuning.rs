//! What of a policy trains: linears that have adapters, by PEFT's targets, and modules in full.
//!
//! ```text
//! run file               adapters           in full
//! neither                none               what the policy's kind trains by default
//! model.train            none               the same and what its patterns mean
//! lora                   what targets mean  nothing, as LeRobot's own training with PEFT
//! lora and model.train   what targets mean  what the patterns mean
//! ```
//!
//! Modules are called as in the policy's file, which are the names that PEFT has for them above LeRobot's
//! class. Of the last decoder layer nothing but keys and values is read, of the language model no norm behind
//! it and no head: modules that nothing reads do not train in full, and an adapter there stays as it began.
//! The vision tower does not train.

use coxswain_models::{
    joint::outline::NamedShape,
    pretrained::{
        adapters::{HeadAdapter, TunedModules},
        error::ModelError,
        rules::{Place, Rules},
    },
};
use coxswain_nn::lora::{Bias, Lora, LoraError, LoraTargets, Module, ModuleKind};

/// Why the vision tower does neither.
const FROZEN_TOWER: &str = "part of the vision tower, which cannot be trained in this task; write a regular \
                            expression that matches only trainable modules, for instance `.*expert.*`";

/// What a run file asks for.
#[derive(Clone, Copy, Debug, Default)]
pub struct TuningSettings<'s> {
    /// The section `lora`.
    pub lora: Option<&'s Lora>,
    /// `model.train`.
    pub train: &'s [String],
}

/// What of a policy can train.
pub(crate) struct TrainableParts<'p> {
    /// The policy's modules.
    pub modules: Vec<Module>,
    /// What names mean.
    pub rules: Rules,
    /// What trains where the run names nothing, as patterns of `model.train`.
    pub default: Vec<String>,
    /// What adapters are on where the run does not say it.
    pub targets: &'static str,
    /// The linear behind the tower, which trains.
    pub connector: String,
    /// Whether what a policy computes depends on a module of this name.
    pub reached: &'p dyn Fn(&str) -> bool,
}

impl TrainableParts<'_> {
    /// What of it trains as a run asks for.
    pub fn tuned(&self, asked: TuningSettings<'_>) -> Result<TunedModules, ModelError> {
        let Self { modules, rules, default, connector, .. } = self;
        let lora = asked.lora.map(|lora| with_targets(lora, self.targets));
        let default = default.iter().filter(|_| lora.is_none());
        let patterns: Vec<String> = default.chain(asked.train).cloned().collect();
        let reached = |module: &Module| (self.reached)(&module.name);
        let tuned =
            TunedModules::resolve_reached(lora.as_ref(), &patterns, modules, &reached, HeadAdapter::Taken)?;
        let refuse =
            |field: &str, problem: String| Err(LoraError::Setting { field: field.into(), problem }.into());
        if lora.is_some_and(|lora| lora.bias == Bias::All) {
            return refuse(
                "lora.bias",
                "`all` also trains the vision tower's biases, which is not supported; set `lora_only`".into(),
            );
        }
        let plan = tuned.trains().lora;
        let adapted =
            plan.into_iter().flat_map(|plan| plan.adapters()).map(|(name, _)| ("lora.targets", name));
        for (field, name) in adapted.chain(tuned.full.iter().map(|name| ("model.train", name))) {
            match (rules.place)(&format!("{name}.weight")) {
                Place::Vision(_) if name != connector => {
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
}

/// The section, with these targets where it has none.
pub(crate) fn with_targets(lora: &Lora, targets: &str) -> Lora {
    let mut lora = lora.clone();
    if lora.targets == LoraTargets::default() {
        lora.targets = LoraTargets::Regex(targets.into());
    }
    lora
}

/// The modules that have these tensors, in their order.
pub(crate) fn modules_of(tensors: &[&NamedShape]) -> Vec<Module> {
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
