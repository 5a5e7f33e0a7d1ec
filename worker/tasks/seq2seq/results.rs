//! What a run leaves of the model, and another one may start from (`train.init_from`).

use std::path::{Path, PathBuf};

use coxswain_models::t5::{T5Config, modules::modules};
use coxswain_nn::files::StoredTensor;
use coxswain_proto::run_spec::RunSpec;
use coxswain_task::TaskError;

use super::config::Seq2SeqSettings;
use crate::pretrained::{self, Tuning};

/// What a run leaves beside its adapter.
const RESULTS: [&str; 1] = ["base.safetensors"];

/// The files of weights at a path; empty if it is none of these formats.
pub(super) fn files(path: &Path) -> Vec<PathBuf> {
    pretrained::files(path, &RESULTS)
}

/// The tensors that a run of this task has left at `path`, or of any PEFT directory for its model.
pub(super) fn read(spec: &RunSpec, path: &Path) -> Result<Vec<StoredTensor>, TaskError> {
    let Seq2SeqSettings { model, lora, .. } = Seq2SeqSettings::of(spec).map_err(TaskError::bad_input)?;
    let modules = || {
        let config = T5Config::read(Path::new(&model.path)).map_err(TaskError::bad_input)?;
        Ok(modules(&config))
    };
    let here = Tuning { modules: &modules, lora: &|_| Ok(lora.clone()), train: &model.train };
    pretrained::read(path, &RESULTS, &here)
}
