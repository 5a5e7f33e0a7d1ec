//! What of SmolVLA trains: by default the expert and the projections, as LeRobot.
//!
//! With `train_expert_only: false` in config.json the default has connector, table and all decoder layers of
//! the language model but the last, too.

use std::path::Path;

use coxswain_models::{
    joint::{JointOutline, outline::NamedShape},
    pretrained::{adapters::TunedModules, checkpoint::Checkpoint, error::ModelError},
};
use coxswain_nn::lora::Module;

use super::{
    config::SmolVlaConfig,
    names::{EXPERT_AT, RULES, VLM, is_reached},
};
use crate::tuning::{TrainableParts, TuningSettings, modules_of};

/// What LeRobot's own training with PEFT adapts where it is not told.
pub(crate) const TARGETS: &str = concat!(
    r"(model\.vlm_with_expert\.lm_expert\..*\.(q|v)_proj|",
    r"model\.(state_proj|action_in_proj|action_out_proj|action_time_mlp_in|action_time_mlp_out))"
);
/// What trains by default, as patterns of `model.train`: the expert, projections, the state's, and some of
/// what `train_expert_only: false` adds.
const OWN: [&str; 2] = ["lm_expert", r"model\.action_(in_proj|out_proj|time_mlp_in|time_mlp_out)"];
const STATE: &str = r"model\.state_proj";
const OF_VLM: &str = r"vlm\.model\.(connector|text_model\.embed_tokens)";

/// What trains of the policy in `dir` beside such a language model.
pub fn tuned(
    dir: &Path,
    config: &SmolVlaConfig,
    vlm: &JointOutline,
    asked: TuningSettings<'_>,
) -> Result<TunedModules, ModelError> {
    let own = OWN.into_iter().chain(config.trains.state.then_some(STATE));
    let last = vlm.layers.saturating_sub(1);
    let below = format!(r"vlm\.model\.text_model\.layers\.(?!{last}\.)\d+");
    let of_vlm = [Some(OF_VLM), (last > 0).then_some(&*below)].into_iter().flatten();
    let parts = TrainableParts {
        modules: modules(dir, config, vlm),
        rules: RULES,
        default: own.chain(of_vlm.filter(|_| config.trains.vlm)).map(str::to_owned).collect(),
        targets: TARGETS,
        connector: VLM.connector(),
        reached: &|name| is_reached(name, vlm.layers),
    };
    parts.tuned(asked)
}

/// All modules of the policy in `dir` that have weights, in the order of the file's tensors.
pub fn modules(dir: &Path, config: &SmolVlaConfig, vlm: &JointOutline) -> Vec<Module> {
    let own = config.own_tensors(vlm, expert_inner(dir));
    modules_of(&vlm.tensors.iter().chain(&own).collect::<Vec<&NamedShape>>())
}

/// Width of the expert's MLP, which no key says: by the header of the weights. Plans are made without them,
/// too.
pub(super) fn expert_inner(dir: &Path) -> Option<usize> {
    let gate = format!("{EXPERT_AT}.layers.0.mlp.gate_proj.weight");
    let checkpoint = Checkpoint::open(dir, RULES).ok()?;
    checkpoint.stored(&gate).ok()?.1.first().copied()
}
