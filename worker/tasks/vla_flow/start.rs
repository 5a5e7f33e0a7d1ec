//! Weights in this task's own formats, as a run may start from them (`train.init_from`): PEFT directories,
//! the files that a run leaves of its expert, its sensor encoder and what trained in full of the model, and a
//! whole directory of results.

use std::path::{Path, PathBuf};

use coxswain_models::qwen2_5_vl::{config::QwenConfig, modules::modules};
use coxswain_nn::{
    files::{StoredTensor, read_tensors},
    lora::{Lora, LoraPlan, PeftAdapter},
    params::Group,
};
use coxswain_proto::run_spec::RunSpec;
use coxswain_task::TaskError;

use super::{EXPERT, adapters::Split, config::VlaSettings};

const PEFT: [&str; 2] = ["adapter_config.json", "adapter_model.safetensors"];
/// Beside each other in a run's results.
const RESULTS: [&str; 3] = ["expert.safetensors", "sensor.safetensors", "base.safetensors"];

/// The files of weights at a path; empty if it is none of these formats.
pub fn files(path: &Path) -> Vec<PathBuf> {
    if path.is_file() {
        return vec![path.into()];
    }
    let adapter = [path.into(), path.join("adapter")].into_iter().find(|dir| dir.join(PEFT[0]).is_file());
    let adapter = adapter.into_iter().flat_map(|dir| PEFT.map(|file| dir.join(file)));
    let results = RESULTS.into_iter().map(|file| path.join(file)).filter(|file| file.is_file());
    adapter.chain(results).collect()
}

/// The tensors of these files.
pub fn read(spec: &RunSpec, path: &Path) -> Result<Vec<StoredTensor>, TaskError> {
    let mut tensors = Vec::new();
    for file in files(path) {
        match file.file_name().and_then(|name| name.to_str()) {
            Some(name) if name == PEFT[0] => {
                tensors.extend(read_adapter(spec, file.parent().unwrap_or(path))?);
            }
            // Read together with its configuration.
            Some(name) if name == PEFT[1] && file.with_file_name(PEFT[0]).is_file() => {}
            _ => {
                let read = read_tensors(&file);
                tensors.extend(
                    read.map_err(|error| TaskError::bad_input(format!("{}: {error}", file.display())))?,
                );
            }
        }
    }
    Ok(tensors)
}

/// Ranks that differ show as shapes; a scale that differs would not show at all.
fn read_adapter(spec: &RunSpec, dir: &Path) -> Result<Vec<StoredTensor>, TaskError> {
    let vla = VlaSettings::of(spec).map_err(TaskError::bad_input)?;
    let config = QwenConfig::read(Path::new(&vla.model.path)).map_err(TaskError::bad_input)?;
    let modules = modules(&config);
    let adapter = PeftAdapter::read(dir, &modules).map_err(TaskError::bad_input)?;
    let lora = Split::of(&vla, &modules).map_err(TaskError::bad_input)?.model;
    if let Some(lora) = &lora {
        let ours = LoraPlan::resolve(lora, &modules).map_err(TaskError::bad_input)?;
        let rescaled = adapter.plan().adapters().find_map(|(name, theirs)| {
            let ours = ours.adapter(name).filter(|ours| ours.rank == theirs.rank)?;
            (ours.scale != theirs.scale).then(|| format!("`{name}`: {theirs} there, {ours} here"))
        });
        if let Some(difference) = rescaled {
            return Err(TaskError::bad_input(format!(
                "{}: {difference}; set lora.alpha and lora.rslora as in its adapter_config.json",
                dir.display()
            )));
        }
    }
    Ok(adapter.into_tensors())
}

/// Keys that weights of these groups depend on beyond their shapes, where two runs differ in them.
pub fn other_meaning(here: &RunSpec, there: &RunSpec, groups: &[Group]) -> Vec<String> {
    let (Ok(here), Ok(there)) = (VlaSettings::of(here), VlaSettings::of(there)) else { return Vec::new() };
    let mut problems = Vec::new();
    let mut differs = |key: &str, here: String, there: String| {
        if here != there {
            problems.push(format!("{key}: {there} there, {here} here"));
        }
    };
    if let (true, Some(ours), Some(theirs)) = (groups.contains(&Group::LORA), &here.lora, &there.lora) {
        let scale = |lora: &Lora| lora.alpha.to_string();
        differs("lora.alpha", scale(ours), scale(theirs));
        differs("lora.use_dora", ours.use_dora.to_string(), theirs.use_dora.to_string());
        differs("lora.rslora", ours.rslora.to_string(), theirs.rslora.to_string());
        let patterns = |lora: &Lora| format!("{:?}", lora.alpha_pattern.iter().collect::<Vec<_>>());
        differs("lora.alpha_pattern", patterns(ours), patterns(theirs));
    }
    if groups.contains(&EXPERT) {
        differs("expert.heads", here.expert.heads.to_string(), there.expert.heads.to_string());
        let convention = |vla: &VlaSettings| format!("{:?}", vla.expert.convention);
        differs("expert.convention", convention(&here), convention(&there));
    }
    problems
}
