//! How samples are cut from the data set: the task's part of the section `data`.

use std::{collections::BTreeMap, path::Path};

use coxswain_data::NormMode;
use coxswain_models::pretrained::pictures::{Fit, PixelBounds};
use coxswain_proto::run_spec::{EpisodeRange, episode_numbers};
use serde::{Deserialize, Serialize};

use super::{
    augmentation::Augmentation,
    features::{FeatureList, SensorFeature},
};

/// How samples are cut from a LeRobot data set.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Data {
    /// Episodes that are trained on, as far as they are not held out; all if empty.
    #[serde(default)]
    pub episodes: Vec<EpisodeRange>,
    /// Episodes that are left out, whatever else names them: nothing of them is read.
    #[serde(default)]
    pub exclude_episodes: Vec<EpisodeRange>,
    /// Image features, in prompt order.
    pub cameras: Vec<String>,
    /// Which of them is which camera of the policy of LeRobot's that a run starts from, where names differ.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub rename_map: BTreeMap<String, String>,
    /// Proprioceptive state features; none for a policy that sees images alone.
    #[serde(default = "default_state")]
    pub state: FeatureList,
    /// Sensor feature, windows of shape `[window, channels]`; none switches the sensor encoder off.
    #[serde(default)]
    pub sensor: Option<SensorFeature>,
    /// Action features.
    #[serde(default = "default_action")]
    pub action: FeatureList,
    /// Actions per chunk, `H`.
    #[serde(default = "default_horizon")]
    pub horizon: usize,
    /// Rows of the data set from one action of a chunk to the next.
    #[serde(default = "default_stride")]
    pub action_stride: usize,
    /// True for each dimension of an action that is learned as its difference from the state at the beginning
    /// of its chunk; may be shorter than an action.
    #[serde(default)]
    pub delta_actions: Vec<bool>,
    /// Normalisation per kind of feature.
    #[serde(default)]
    pub normalization: Normalization,
    /// `{task}` is replaced by the sample's task text.
    #[serde(default = "default_prompt")]
    pub prompt: String,
    /// What is done to an image before `smart_resize`.
    #[serde(default)]
    pub resize: Fit,
    /// Bounds of an image's pixels after `smart_resize`; the checkpoint's own when absent. An upper bound is
    /// always applied.
    #[serde(default)]
    pub min_pixels: Option<usize>,
    /// See `min_pixels`.
    #[serde(default)]
    pub max_pixels: Option<usize>,
    /// Random changes of images in training.
    #[serde(default)]
    pub augmentation: Augmentation,
    /// Several data sets to train on at once, below `data.path`; that directory itself when empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sets: Vec<DataSet>,
}

impl Data {
    /// The policy's name of a camera.
    pub fn renamed<'n>(&'n self, camera: &'n str) -> &'n str {
        self.rename_map.get(camera).map_or(camera, String::as_str)
    }
}

fn default_state() -> FeatureList {
    "observation.state".into()
}
fn default_action() -> FeatureList {
    "action".into()
}
fn default_horizon() -> usize {
    16
}
fn default_stride() -> usize {
    1
}
fn default_prompt() -> String {
    "{task}".into()
}

/// Normalisation per kind of feature, from the data set's `stats.json`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Normalization {
    /// Proprioceptive state.
    pub state: NormMode,
    /// Actions.
    pub action: NormMode,
    /// Sensor window.
    pub sensor: NormMode,
}

/// One data set of a mixture. What is not given is as the section `data` says.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataSet {
    /// The data set's directory, below `data.path` if it is relative.
    pub path: String,
    /// The set's name: letters, digits, `-`, `_`, `.`; the last part of the path when absent.
    #[serde(default)]
    pub name: Option<String>,
    /// How often each of its samples comes, beside those of the others; 1 when absent.
    #[serde(default)]
    pub weight: Option<f64>,
    /// Instead of that: how much of an epoch it is, beside the others, whatever its size.
    #[serde(default)]
    pub share: Option<f64>,
    /// Which of its features is which of `data.cameras`. A camera that is not listed is missing in this set.
    /// When absent, all are there under the names they have.
    #[serde(default)]
    pub cameras: Option<BTreeMap<String, String>>,
    /// See `data.state`.
    #[serde(default)]
    pub state: Option<FeatureList>,
    /// See `data.sensor`.
    #[serde(default)]
    pub sensor: Option<SensorFeature>,
    /// See `data.action`.
    #[serde(default)]
    pub action: Option<FeatureList>,
    /// See `data.prompt`.
    #[serde(default)]
    pub prompt: Option<String>,
    /// See `data.normalization`; by this set's own statistics in any case.
    #[serde(default)]
    pub normalization: Option<Normalization>,
    /// Episodes of this set that are trained on, as far as they are not held out; all if empty.
    #[serde(default)]
    pub episodes: Vec<EpisodeRange>,
    /// Episodes of this set that are left out, whatever else names them.
    #[serde(default)]
    pub exclude_episodes: Vec<EpisodeRange>,
    /// Episodes of this set that are kept out of training.
    #[serde(default, deserialize_with = "episode_numbers")]
    pub holdout_episodes: Vec<usize>,
}

impl DataSet {
    /// The set's name, given or from its path.
    pub fn name(&self) -> &str {
        let last = || Path::new(&self.path).file_name().and_then(|name| name.to_str());
        self.name.as_deref().or_else(last).unwrap_or(&self.path)
    }

    /// What it calls one of the run's cameras; none if it does not say.
    pub(super) fn camera<'s>(&'s self, camera: &'s str) -> Option<&'s String> {
        self.cameras.as_ref()?.get(camera)
    }

    /// Whether it has one of the run's cameras.
    pub(super) fn has(&self, camera: &str) -> bool {
        self.cameras.is_none() || self.camera(camera).is_some()
    }
}

impl Data {
    /// What the run says of the size of images.
    pub fn pixel_bounds(&self) -> PixelBounds {
        PixelBounds { min: self.min_pixels, max: self.max_pixels, fit: self.resize }
    }

    /// Whether the policy takes a state, of any set.
    pub fn has_state(&self) -> bool {
        let of_set = |set: &DataSet| !set.state.as_ref().unwrap_or(&self.state).is_none();
        if self.sets.is_empty() { !self.state.is_none() } else { self.sets.iter().any(of_set) }
    }

    /// The set of this name; if there is none, the names that there are.
    pub fn set(&self, name: &str) -> Result<&DataSet, String> {
        let names = || self.sets.iter().map(DataSet::name).collect::<Vec<_>>().join(", ");
        self.sets.iter().find(|set| set.name() == name).ok_or_else(names)
    }
}
