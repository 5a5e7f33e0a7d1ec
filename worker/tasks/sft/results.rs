//! What a run of this task leaves, read again: by one that starts from it, and by `cox generate`.

use std::path::{Path, PathBuf};

use coxswain_models::qwen2_5_vl::{config::QwenConfig, modules::modules};
use coxswain_nn::files::StoredTensor;
use coxswain_proto::run_spec::RunSpec;
use coxswain_task::TaskError;

use super::config::SftSettings;
use crate::pretrained::{self, Tuning};

/// Beside the adapter.
const RESULTS: [&str; 1] = ["base.safetensors"];

/// The files of weights at a path; none if nothing there is of this task.
pub fn files(path: &Path) -> Vec<PathBuf> {
    pretrained::files(path, &RESULTS)
}

/// Their tensors under the names that this run's layout has for them.
pub fn read(spec: &RunSpec, path: &Path) -> Result<Vec<StoredTensor>, TaskError> {
    let SftSettings { model, lora, .. } = SftSettings::of(spec).map_err(TaskError::bad_input)?;
    let modules = || {
        let config = QwenConfig::read(Path::new(&model.path)).map_err(TaskError::bad_input)?;
        Ok(modules(&config))
    };
    let here = Tuning { modules: &modules, lora: &|_| Ok(lora.clone()), train: &model.train };
    pretrained::read(path, &RESULTS, &here)
}
