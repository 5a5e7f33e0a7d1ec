//! Weights in this task's own formats, as a run may start from them (`train.init_from`): PEFT directories,
//! the files that a run leaves of its expert, its sensor encoder and what trained in full of the model, and a
//! whole directory of results.

use std::path::{Path, PathBuf};

use coxswain_models::{
    Shelf,
    pretrained::{directory, error::ModelError},
};
use coxswain_nn::{files::StoredTensor, kernels::sizes::Sizes, lora::Module, params::Group};
use coxswain_proto::run_spec::RunSpec;
use coxswain_task::TaskError;

use super::{EXPERT, adapters::Split, base::PolicyBase, config::VlaSettings};
use crate::pretrained::{self, Tuning};

/// Beside each other in a run's results.
const RESULTS: [&str; 3] = ["expert.safetensors", "sensor.safetensors", "base.safetensors"];

/// The files of weights at a path; empty if it is none of these formats.
pub fn files(path: &Path) -> Vec<PathBuf> {
    pretrained::files(path, &RESULTS)
}

/// The tensors of these files.
pub fn read(spec: &RunSpec, models: Shelf<Sizes>, path: &Path) -> Result<Vec<StoredTensor>, TaskError> {
    let vla = VlaSettings::from_spec(spec).map_err(TaskError::bad_input)?;
    let base = PolicyBase::from_settings(&vla, models).map_err(TaskError::bad_input)?;
    let outline = || {
        let dir = directory::outline(&vla.model.path).map_err(ModelError::from)?;
        models.vision_language.of(&dir)?.outline(&dir)
    };
    let lora = |_: &[Module]| match &base {
        Some(base) => Ok(vla.lora.as_ref().map(|lora| base.kind.with_targets(lora))),
        // A model that cannot be read has been refused with its modules.
        None => outline().map_or(Ok(None), |model| Ok(Split::from_settings(&vla, &model)?.model)),
    };
    let modules = || match &base {
        Some(base) => Ok(base.modules()),
        None => outline().map(|model| model.modules).map_err(TaskError::bad_input),
    };
    let weights = vla.model.weights_dtype;
    let here = Tuning { modules: &modules, lora: &lora, train: &vla.model.train, weights };
    pretrained::read(path, &RESULTS, &here)
}

/// Keys that weights of these groups depend on beyond their shapes, where two runs differ in them.
pub fn other_meaning(here: &RunSpec, there: &RunSpec, groups: &[Group]) -> Vec<String> {
    let Ok(here) = VlaSettings::from_spec(here) else { return Vec::new() };
    let mut problems = pretrained::other_meaning(here.lora.as_ref(), there, groups);
    let Ok(there) = VlaSettings::from_spec(there) else { return problems };
    let mut differs = |key: &str, here: String, there: String| {
        if here != there {
            problems.push(format!("{key}: {there} there, {here} here"));
        }
    };
    if groups.contains(&EXPERT) {
        let head = |vla: &VlaSettings| format!("{:?}", vla.expert.head);
        differs("expert.head", head(&here), head(&there));
        differs("expert.heads", here.expert.heads.to_string(), there.expert.heads.to_string());
        let convention = |vla: &VlaSettings| format!("{:?}", vla.expert.convention);
        differs("expert.convention", convention(&here), convention(&there));
    }
    problems
}
