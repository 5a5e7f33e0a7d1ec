//! What of pi0 and pi0.5 trains: by default the expert and the projections. LeRobot's own default is
//! everything, unless config.json says `train_expert_only`.

use coxswain_models::{
    joint::{JointOutline, outline::NamedShape},
    pretrained::{adapters::TunedModules, error::ModelError, rules::Place},
};
use coxswain_nn::lora::{LoraError, Module};

use super::{
    config::PiConfig,
    names::{VLM, is_reached},
};
use crate::tuning::{TrainableParts, TuningSettings, modules_of};

/// What LeRobot's own training with PEFT adapts where it is not told. pi0.5 has not all of it.
pub(crate) const TARGETS: &str = concat!(
    r"(.*\.gemma_expert\..*\.self_attn\.(q|v)_proj|",
    r"model\.(state_proj|action_in_proj|action_out_proj|action_time_mlp_in|action_time_mlp_out))"
);
/// What trains by default, as patterns of `model.train`.
const OWN: [&str; 2] =
    [r"gemma_expert\.model", r"model\.(state_proj|action_(in|out)_proj|(action_)?time_mlp_(in|out))"];

/// What trains of such a policy beside such a vision-language model.
pub fn tuned(
    config: &PiConfig,
    vlm: &JointOutline,
    asked: TuningSettings<'_>,
) -> Result<TunedModules, ModelError> {
    let parts = TrainableParts {
        modules: modules(config, vlm),
        rules: config.kind.rules(),
        default: OWN.map(str::to_owned).into(),
        targets: TARGETS,
        connector: VLM.connector(),
        reached: &|name| is_reached(name, vlm.layers),
    };
    let tuned = parts.tuned(asked)?;
    let is_table = |name: &&str| (config.kind.rules().place)(&format!("{name}.weight")) == Place::Table;
    let table = tuned.full.iter().find(is_table).map(str::to_owned);
    match table {
        None => Ok(tuned),
        Some(name) => {
            let problem = format!("matches `{name}`, which cannot be trained in this task; leave it out");
            Err(LoraError::Setting { field: "model.train".into(), problem }.into())
        }
    }
}

/// All modules of such a policy that have weights.
pub fn modules(config: &PiConfig, vlm: &JointOutline) -> Vec<Module> {
    let own = config.own_tensors(vlm);
    modules_of(&vlm.tensors.iter().chain(&own).collect::<Vec<&NamedShape>>())
}
