//! A task's keys, as its data are opened with them, and the rules that several tasks have.

use coxswain_data::DataError;
use coxswain_models::pretrained::error::ModelError;
use coxswain_nn::lora::Lora;
use coxswain_proto::{
    config::{Findings, SettingsError},
    run_spec::{CacheMode, RunSpec},
};

/// Keys have been checked, unless the specification did not come through the engine; then they are refused.
pub fn checked<S>(settings: Result<S, SettingsError>) -> Result<S, DataError> {
    settings.map_err(|error| DataError::Invalid {
        path: "the run's specification".into(),
        field: "task".into(),
        found: error.to_string(),
        remedy: "read it from a run file, or check it against the task's schema".into(),
    })
}

/// A model that cannot be read, where data are opened.
pub fn unread(error: ModelError) -> DataError {
    match error {
        ModelError::Away(error) => error,
        error => DataError::Model(error.to_string()),
    }
}

/// Something of the model trains, and moves: by adapters, or in full where `train` names it, with these
/// rates.
pub fn check_trained(lora: Option<&Lora>, train: &[String], [adapted, whole]: [f64; 2], f: &mut Findings) {
    f.require(
        lora.is_some() || !train.is_empty(),
        "lora",
        "is missing, and `model.train` names nothing either, so nothing would train",
        "add a section `lora`, or patterns of modules to `model.train`",
    );
    let moves = [(lora.is_some(), adapted), (!train.is_empty(), whole)];
    f.require(
        moves.iter().all(|(there, _)| !there) || moves.iter().any(|(there, rate)| *there && *rate != 0.0),
        if lora.is_some() { "optimizer.lr.lora" } else { "optimizer.lr.base" },
        "is 0, and so is the rate of everything else that this run trains, so nothing would be learned",
        "give a trained group a rate above 0",
    );
    f.learning_rate("lora", adapted);
    f.learning_rate("base", whole);
}

/// Keys of the engine that a run on texts has no use for. `samples` is what they are called.
pub fn check_texts(spec: &RunSpec, samples: &str, f: &mut Findings) {
    f.require(
        spec.data.holdout_episodes.is_empty(),
        "data.holdout_episodes",
        format_args!("is given, but {samples} have no episodes"),
        "use `data.holdout_every`",
    );
    f.require(
        spec.cache.mode == CacheMode::Off,
        "cache.mode",
        "is not `off`, but this task caches no features",
        "remove it",
    );
}
