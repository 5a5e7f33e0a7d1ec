//! A policy directory as LeRobot writes it: the one that a run began with, its weights as they were
//! trained, its features and statistics those of the data set.
//!
//! Weights keep the types of the files that they are from, and are one file, as LeRobot reads them. Of
//! processors only the steps that normalise change: which features there are, and their state files. What
//! else lies in the directory is copied, but for README and training configuration, which are of another
//! training.

use std::{
    collections::BTreeMap,
    fmt::{self, Display},
    fs, io,
    path::Path,
};

use coxswain_models::pretrained::{
    checkpoint::Checkpoint,
    error::ModelError,
    merge::{TrainedModel, write_merged},
    rules::Rules,
};
use coxswain_nn::{files::floats, lora::LoraPlan, params::TrainableLayout};
use coxswain_proto::{bounded, human, limits::MAX_METADATA_BYTES};
use safetensors::{Dtype, tensor::TensorView};
use serde_json::{Map, Value, json};

use super::directory::{Feature, PolicyDirectory};

/// Both processors.
pub const PROCESSORS: [&str; 2] = ["policy_preprocessor.json", "policy_postprocessor.json"];
/// The configuration of another training, which is not left beside the export.
const LEFT: &str = "train_config.json";

/// Statistics of features, each by its name: `mean`, `std`, `min`, `max`, `q01`, `q99`.
pub type Statistics = BTreeMap<String, BTreeMap<String, Vec<f32>>>;

/// What is written.
#[derive(Clone, Copy)]
pub struct Export<'e> {
    /// The directory that the run began with.
    pub directory: &'e PolicyDirectory,
    /// What names in its weights mean.
    pub rules: Rules,
    /// What names become in the policy that is written.
    pub named: fn(&str) -> String,
    /// Which linears have adapters; they are merged.
    pub plan: Option<&'e LoraPlan>,
    /// What trained.
    pub layout: &'e TrainableLayout,
    /// Values of what trained.
    pub values: &'e [f32],
    /// What the policy sees.
    pub inputs: &'e [Feature],
    /// What it gives.
    pub outputs: &'e [Feature],
    /// Statistics of the data set.
    pub statistics: &'e Statistics,
    /// Which of its features is which of the policy's, where names differ.
    pub renamed: &'e BTreeMap<String, String>,
}

/// What trained values have lost by being rounded to the types of the file that they came from.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Rounding {
    values: usize,
    /// Sums of squares: of the values, and of what they are off by.
    squares: [f64; 2],
}

impl Rounding {
    /// What they are off by, over their size: both as the square root of the sum of squares.
    pub fn relative(&self) -> f64 {
        let [size, off] = self.squares;
        if off == 0.0 { 0.0 } else { (off / size).sqrt() }
    }

    /// Measures what trained in full against what a directory has of it now.
    fn measure(dir: &Path, Export { rules, layout, values, .. }: Export<'_>) -> Result<Self, ModelError> {
        let checkpoint = Checkpoint::open(dir, rules)?;
        let mut rounding = Self::default();
        for param in layout.params().iter().filter(|param| checkpoint.contains(&param.name)) {
            let (dtype, shape, bytes) = checkpoint.stored(&param.name)?;
            let stored = TensorView::new(dtype, shape.to_vec(), bytes).ok().and_then(|view| floats(&view));
            for (stored, value) in stored.iter().flatten().zip(&values[param.range()]) {
                let (value, off) = (f64::from(*value), f64::from(value - stored));
                rounding.squares = [rounding.squares[0] + value * value, rounding.squares[1] + off * off];
                rounding.values += 1;
            }
        }
        Ok(rounding)
    }
}

impl Display for Rounding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let values = human::grouped(self.values as u64);
        match self.relative() {
            _ if self.values == 0 => f.write_str("adapters merged, in the base model's dtypes"),
            0.0 => write!(f, "{values} trained values, kept exactly"),
            off => write!(
                f,
                "{values} trained values, off by {:.2} % after rounding to the base model's dtypes",
                100.0 * off
            ),
        }
    }
}

/// Writes the policy to `out`, whole or not at all, in the place of what is there.
pub fn write(out: &Path, export: Export<'_>) -> Result<Rounding, ModelError> {
    // Names that nobody else gives: what is left below them by a process that was killed is deleted.
    let beside = |end: &str| {
        let mut name = std::ffi::OsString::from(".");
        name.push(out.file_name().unwrap_or_default());
        name.push(end);
        out.with_file_name(name)
    };
    let (staged, old) = (beside(".cox-new"), beside(".cox-old"));
    [&staged, &old].into_iter().for_each(|left| drop(fs::remove_dir_all(left)));
    let Export { directory, rules, named, plan, layout, values, .. } = export;
    let trained = TrainedModel { rules, tied: None, joined: Some(named), plan, layout, values };
    let replaced = || {
        if out.exists() {
            fs::rename(out, &old)?;
        }
        fs::rename(&staged, out).inspect_err(|_| drop(fs::rename(&old, out)))
    };
    let written = write_merged(&directory.dir, &staged, trained)
        .and_then(|()| beside_weights(&staged, export))
        .and_then(|()| Rounding::measure(&staged, export))
        .and_then(|rounding| replaced().map(|()| rounding).map_err(unwritten(out)));
    // The first error is the one to report.
    let _ = fs::remove_dir_all(if written.is_ok() { &old } else { &staged });
    written
}

fn beside_weights(out: &Path, export: Export<'_>) -> Result<(), ModelError> {
    let Export { directory, inputs, outputs, statistics, renamed, .. } = export;
    let mut config = directory.json.clone();
    config["input_features"] = listed(inputs);
    config["output_features"] = listed(outputs);
    write_json(&out.join("config.json"), &config)?;
    let _ = fs::remove_file(out.join(LEFT));
    let both: Vec<Feature> = inputs.iter().chain(outputs).cloned().collect();
    for file in PROCESSORS {
        let path = out.join(file);
        let text = bounded::read_text(&path, MAX_METADATA_BYTES).map_err(unwritten(&path))?;
        let mut json: Value =
            serde_json::from_str(&text).map_err(|source| ModelError::Json { path: path.clone(), source })?;
        for step in json.get_mut("steps").and_then(Value::as_array_mut).into_iter().flatten() {
            if let Some(features) = step.get_mut("config").and_then(|config| config.get_mut("features")) {
                *features = listed(if file == PROCESSORS[0] { &both[..] } else { outputs });
            }
            if let Some(width) = step.get_mut("config").and_then(|config| config.get_mut("env_action_dim")) {
                *width = json!(outputs.iter().find_map(|feature| feature.shape.first()));
            }
            if let Some(map) = step.get_mut("config").and_then(|config| config.get_mut("rename_map")) {
                *map = json!(renamed);
            }
            if let Some(state) = step.get("state_file").and_then(Value::as_str) {
                write_statistics(&out.join(state), statistics)?;
            }
        }
        write_json(&path, &json)?;
    }
    Ok(())
}

/// Features as `config.json` has them.
pub(crate) fn listed(features: &[Feature]) -> Value {
    let one =
        |feature: &Feature| (feature.name.clone(), json!({ "type": feature.kind, "shape": feature.shape }));
    Value::Object(features.iter().map(one).collect::<Map<_, _>>())
}

pub(crate) fn write_json(path: &Path, json: &Value) -> Result<(), ModelError> {
    let text = serde_json::to_string_pretty(json)
        .map_err(|source| ModelError::Json { path: path.into(), source })?;
    fs::write(path, text).map_err(unwritten(path))
}

pub(crate) fn write_statistics(path: &Path, statistics: &Statistics) -> Result<(), ModelError> {
    let all = statistics.iter().flat_map(|(feature, of)| {
        of.iter().map(move |(name, values)| {
            let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            (format!("{feature}.{name}"), values.len(), bytes)
        })
    });
    let all: Vec<_> = all.collect();
    let garbled = |error: safetensors::SafeTensorError| ModelError::Safetensors {
        path: path.into(),
        problem: error.to_string(),
    };
    let views = all
        .iter()
        .map(|(name, len, bytes)| Ok((name.as_str(), TensorView::new(Dtype::F32, vec![*len], bytes)?)));
    let views = views.collect::<Result<Vec<_>, _>>().map_err(garbled)?;
    let bytes = safetensors::serialize(views, None).map_err(garbled)?;
    fs::write(path, bytes).map_err(unwritten(path))
}

pub(crate) fn unwritten(path: &Path) -> impl FnOnce(io::Error) -> ModelError + use<> {
    let path = path.to_owned();
    move |source| ModelError::Io {
        path,
        source,
        remedy: "check that the directory is writable and has space",
    }
}
