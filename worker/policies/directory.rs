//! LeRobot's policy directory, as its files say it. Nothing here knows what kind of policy it is.
//!
//! | file | what is in it |
//! |---|---|
//! | `config.json` | `type`, features, and the type's own keys |
//! | `model.safetensors` | weights |
//! | `policy_preprocessor.json`, `policy_postprocessor.json` | steps from a sample to the model, and back |
//! | the steps' state files | statistics |

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use coxswain_data::DataError;
use coxswain_models::pretrained::{config_file, error::ModelError, fields::Fields};
use coxswain_nn::files::floats;
use coxswain_proto::{bounded, limits::MAX_METADATA_BYTES};
use safetensors::SafeTensors;
use serde_json::Value;

/// Every `type` that is read.
pub const TYPES: [&str; 4] = [SMOLVLA, PI0, PI05, GROOT];
/// Types, as `config.json` names them.
pub const SMOLVLA: &str = "smolvla";
/// The type of pi0, as `config.json` names it.
pub const PI0: &str = "pi0";
/// The type of pi0.5, as `config.json` names it.
pub const PI05: &str = "pi05";
/// The type of GR00T N1.7, as `config.json` names it.
pub const GROOT: &str = "groot";
/// What normalisation is refused without, in older directories.
const MIGRATE: &str = "if the directory is from an older LeRobot, its statistics are in the weights; convert it with `python -m lerobot.processor.migrate_policy_normalization --pretrained-path DIR`";

/// `config.json` of a policy directory.
#[derive(Clone, Debug)]
pub struct PolicyDirectory {
    /// The directory.
    pub dir: PathBuf,
    /// `config.json`.
    pub path: PathBuf,
    /// What it holds.
    pub json: Value,
}

/// A feature of a policy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Feature {
    /// The feature's name in samples.
    pub name: String,
    /// `VISUAL`, `STATE` or `ACTION`.
    pub kind: String,
    /// The feature's shape.
    pub shape: Vec<usize>,
}

/// A step of a processor.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    /// `registry_name`.
    pub name: String,
    /// The step's keys.
    pub config: Value,
    /// The file of its tensors.
    pub state_file: Option<String>,
}

/// Mean and standard deviation of a feature.
#[derive(Clone, Debug, PartialEq)]
pub struct MeanStd {
    /// Means.
    pub mean: Vec<f32>,
    /// Standard deviations.
    pub std: Vec<f32>,
}

/// Whether `dir` holds a policy of LeRobot's, of whatever type.
pub fn is_policy(dir: &Path) -> bool {
    let Ok((_, json)) = config_file::read(dir) else { return false };
    json.get("model_type").is_none() && json.get("type").is_some_and(Value::is_string)
}

impl PolicyDirectory {
    /// Reads `config.json`; refuses a `type` that is not read, with those that are.
    pub fn from_dir(dir: &Path) -> Result<Self, ModelError> {
        let (path, json) = config_file::read(dir)?;
        let directory = Self { dir: dir.into(), path, json };
        let fields = directory.fields()?;
        let kind = fields
            .str("type")?
            .ok_or_else(|| fields.error("type", "missing: not a LeRobot policy directory"))?;
        if !TYPES.contains(&kind) {
            return Err(fields.error("type", format!("{kind:?}; supported policies: {}", TYPES.join(", "))));
        }
        Ok(directory)
    }

    /// The policy's `type`.
    pub fn kind(&self) -> &str {
        self.json.get("type").and_then(Value::as_str).unwrap_or_default()
    }

    /// Fields of `config.json`.
    pub fn fields(&self) -> Result<Fields<'_>, ModelError> {
        Fields::new(&self.path, &self.json)
    }

    /// Features of `input_features` or `output_features`, in their order.
    pub fn features(&self, key: &str) -> Result<Vec<Feature>, ModelError> {
        let fields = self.fields()?;
        let wrong = |problem: &str| fields.error(key, problem);
        let map = fields
            .get(key)
            .and_then(Value::as_object)
            .ok_or_else(|| wrong("missing, or not an object of features"))?;
        let one = |(name, value): (&String, &Value)| {
            let kind = value.get("type").and_then(Value::as_str)?;
            let sizes = value.get("shape").and_then(Value::as_array)?.iter();
            let shape = sizes.map(|size| usize::try_from(size.as_u64()?).ok()).collect::<Option<_>>()?;
            Some(Feature { name: name.clone(), kind: kind.into(), shape })
        };
        let each = map.iter().map(|feature| {
            one(feature).ok_or_else(|| wrong(&format!("feature `{}` has no valid type and shape", feature.0)))
        });
        each.collect()
    }

    /// Steps of the processor in `file`.
    pub fn steps(&self, file: &str) -> Result<Vec<Step>, ModelError> {
        let path = self.dir.join(file);
        let text = bounded::read_text(&path, MAX_METADATA_BYTES).map_err(|source| ModelError::Io {
            path: path.clone(),
            source,
            remedy: MIGRATE,
        })?;
        let json: Value =
            serde_json::from_str(&text).map_err(|source| ModelError::Json { path: path.clone(), source })?;
        let fields = Fields::new(&path, &json)?;
        let wrong = |problem: String| fields.error("steps", problem);
        let steps = fields
            .get("steps")
            .and_then(Value::as_array)
            .ok_or_else(|| wrong("missing, or not a list".into()))?;
        let one = |(number, step): (usize, &Value)| {
            let text = |key| step.get(key).and_then(Value::as_str).map(str::to_owned);
            let name = text("registry_name").ok_or_else(|| {
                wrong(format!("step {number} has no registry_name; steps named by a class are not supported"))
            })?;
            Ok(Step {
                name,
                config: step.get("config").cloned().unwrap_or(Value::Null),
                state_file: text("state_file"),
            })
        };
        steps.iter().enumerate().map(one).collect()
    }

    /// What a processor's step of this name keeps: tensors, each called by its feature and what it is.
    pub fn kept_by(&self, file: &str, step: &str) -> Result<BTreeMap<String, Vec<f32>>, DataError> {
        let steps = self
            .steps(file)
            .map_err(|error| DataError::invalid(&self.dir.join(file), "steps", error.to_string(), MIGRATE))?;
        let found = steps.into_iter().find(|found| found.name == step).and_then(|found| found.state_file);
        let Some(name) = found else { return Ok(BTreeMap::new()) };
        let path = self.dir.join(name);
        let bytes = bounded::read(&path, MAX_METADATA_BYTES).map_err(DataError::io(&path, "read"))?;
        let tensors = SafeTensors::deserialize(&bytes).map_err(|error| {
            DataError::invalid(&path, "(file)", error.to_string(), "copy the policy directory again")
        })?;
        let named = tensors.tensors().into_iter();
        Ok(named.filter_map(|(name, tensor)| Some((name, floats(&tensor)?))).collect())
    }

    /// Statistics that a processor's step of this name keeps, by feature: those of which there are means
    /// and deviations.
    pub fn statistics(&self, file: &str, step: &str) -> Result<BTreeMap<String, MeanStd>, DataError> {
        let kept = self.kept_by(file, step)?;
        let features = kept.keys().filter_map(|name| name.strip_suffix(".mean"));
        let both = features.filter_map(|feature| {
            let of = |what: &str| kept.get(&format!("{feature}.{what}")).cloned();
            let (mean, std) = (of("mean")?, of("std")?);
            (mean.len() == std.len()).then(|| (feature.to_owned(), MeanStd { mean, std }))
        });
        Ok(both.collect())
    }
}
