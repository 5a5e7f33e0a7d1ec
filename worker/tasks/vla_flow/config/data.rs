//! How samples are cut from the data set: the task's part of the section `data`.

use coxswain_data::NormMode;
use coxswain_models::qwen2_5_vl::processor::Fit;
use serde::{Deserialize, Serialize};

use super::{augmentation::Augmentation, episodes::EpisodeRange};

/// How samples are cut from a LeRobot data set.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Data {
    /// Episodes that are trained on, as far as they are not held out; all if empty.
    #[serde(default)]
    pub episodes: Vec<EpisodeRange>,
    /// Image features, in prompt order.
    pub cameras: Vec<String>,
    /// Proprioceptive state feature.
    #[serde(default = "default_state")]
    pub state: String,
    /// Windowed sensor feature, shape `[window, channels]`; none switches the sensor encoder off.
    #[serde(default)]
    pub sensor: Option<String>,
    /// Action feature.
    #[serde(default = "default_action")]
    pub action: String,
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
}

fn default_state() -> String {
    "observation.state".into()
}
fn default_action() -> String {
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
