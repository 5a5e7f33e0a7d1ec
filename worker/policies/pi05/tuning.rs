//! What of pi0.5 trains: by default the expert and the projections. LeRobot's own default is everything,
//! unless config.json says `train_expert_only`.

use coxswain_models::{
    joint::{JointOutline, outline::NamedShape},
    pretrained::{adapters::TunedModules, error::ModelError, rules::Place},
};
use coxswain_nn::lora::{Lora, LoraError, Module};

use super::{
    config::Pi05Config,
    names::{RULES, connector, is_reached},
};
use crate::tuning::{self, TrainableParts, TuningSettings, modules_of};

/// What LeRobot's own training with PEFT adapts where it is not told, of what pi0.5 has.
const TARGETS: &str =
    r"(.*\.gemma_expert\..*\.self_attn\.(q|v)_proj|model\.(action_in_proj|action_out_proj))";
/// What trains by default, as patterns of `model.train`.
const OWN: [&str; 2] = [r"gemma_expert\.model", r"model\.(action_(in|out)_proj|time_mlp_(in|out))"];

/// What trains of such a policy beside such a vision-language model.
pub fn tuned(
    config: &Pi05Config,
    vlm: &JointOutline,
    asked: TuningSettings<'_>,
) -> Result<TunedModules, ModelError> {
    let parts = TrainableParts {
        modules: modules(config, vlm),
        rules: RULES,
        default: OWN.map(str::to_owned).into(),
        targets: TARGETS,
        connector: connector(),
        reached: &|name| is_reached(name, vlm.layers),
    };
    let tuned = parts.tuned(asked)?;
    let is_table = |name: &&str| (RULES.place)(&format!("{name}.weight")) == Place::Table;
    let table = tuned.full.iter().find(is_table).map(str::to_owned);
    match table {
        None => Ok(tuned),
        Some(name) => {
            let problem = format!("matches `{name}`, which cannot be trained here; leave it out");
            Err(LoraError::Setting { field: "model.train".into(), problem }.into())
        }
    }
}

/// The section, with LeRobot's targets where it has none.
pub fn with_targets(lora: &Lora) -> Lora {
    tuning::with_targets(lora, TARGETS)
}

/// All modules of such a policy that have weights.
pub fn modules(config: &Pi05Config, vlm: &JointOutline) -> Vec<Module> {
    let own = config.own_tensors(vlm);
    modules_of(&vlm.tensors.iter().chain(&own).collect::<Vec<&NamedShape>>())
}
