//! `policy.json`: what a trained policy takes and gives. With this file, the statistics and the weights
//! neither the run file nor the data set is needed.

use coxswain_data::NormMode;
use coxswain_models::pretrained::pictures::Fit;
use serde::{Deserialize, Serialize};

use super::{
    batch::SampleDims,
    dataset::Dataset,
    numeric::{FeatureColumn, Numeric},
};
use crate::vla_flow::config::{FlowConvention, HeadKind, Observation, Serve};

/// Statistics of the features that it names, in LeRobot's layout.
pub const STATS_FILE: &str = "stats.json";

/// What a policy takes and gives.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PolicyFile {
    /// One of [`PolicyFile::FORMATS`].
    pub format: u32,
    /// The pretrained model's directory, as the run named it.
    pub base_model: String,
    /// Cameras in prompt order.
    pub cameras: Vec<CameraInput>,
    /// The proprioceptive state of a frame, `[size]`; none for a policy that sees images alone.
    pub state: Option<NumericFeature>,
    /// The sensor window, `[window, channels]`, or `[channels]` where it is one reading.
    pub sensor: Option<NumericFeature>,
    /// An action, `[size]`.
    pub action: NumericFeature,
    /// Chunks of actions that the policy gives.
    #[serde(flatten)]
    pub chunk: Chunk,
    /// The whole prompt with its special tokens; `{task}` stands for the instruction, and every
    /// `<|image_pad|>` for the tokens of one camera's image.
    pub prompt: String,
    /// Past frames whose images and states are seen before the present ones, as their distances from it in
    /// rows of the recording, the oldest first; absent where there are none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub history: Vec<i64>,
    /// Most tokens of the text in `prompt`, of which the first are kept; absent where all are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_text_tokens: Option<usize>,
    /// What is done to an image before `smart_resize`; absent where nothing is.
    #[serde(default, skip_serializing_if = "is_smart")]
    pub resize: Fit,
    /// Fewest and most pixels of an image after `smart_resize`.
    pub pixels: [usize; 2],
    /// How actions are sampled.
    pub flow: Flow,
    /// What the model's state and actions are padded to with zeros, where another data set's are wider.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub padded: Option<PaddedSizes>,
    /// The names of an observation's values; absent where they are those of the features, and `prompt`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observation: Option<Serve>,
}

/// The actions that a policy gives at once.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Chunk {
    /// How many they are.
    pub horizon: usize,
    /// Steps of the recording's rate from one action to the next; absent where it is 1.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub action_stride: usize,
    /// True for each dimension of an action that the model gives as its difference from the state; absent
    /// where it gives all as they are.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub delta_actions: Vec<bool>,
}

/// A camera, as frames of it are given.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CameraInput {
    /// The camera's feature.
    pub name: String,
    /// Rows.
    pub height: usize,
    /// Columns.
    pub width: usize,
}

/// Numbers, as they are given and taken.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NumericFeature {
    /// The feature.
    pub name: String,
    /// The feature's shape: in the data set, or of all its parts side by side.
    pub shape: Vec<usize>,
    /// Names of its elements; absent where the data set has none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub names: Vec<String>,
    /// How the model's values are made of it, by its statistics.
    pub normalization: NormMode,
    /// The data set's features that it is made of, side by side; absent where it is one of them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub parts: Vec<FeaturePart>,
    /// Rows of a recording that its window is made of, the present one the last; absent where a row has all
    /// of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rows: Option<usize>,
}

/// One feature of several.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FeaturePart {
    /// The feature's name in the data set.
    pub name: String,
    /// The feature's shape in the data set.
    pub shape: Vec<usize>,
}

/// Sizes of the model's values, of a policy that was trained on several data sets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PaddedSizes {
    /// Values of the state of one frame.
    pub state: usize,
    /// Values of an action.
    pub action: usize,
}

/// How actions are sampled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Flow {
    /// What makes them; absent where it is a flow-matching expert. Of a head without a flow the rest means
    /// nothing.
    #[serde(default, skip_serializing_if = "HeadKind::is_default")]
    pub head: HeadKind,
    /// Which end of the flow is noise.
    pub convention: FlowConvention,
    /// Euler steps.
    pub sampling_steps: usize,
    /// Attention heads of the expert: the one size that its tensors do not show.
    pub heads: usize,
    /// `run.seed`, which keys the noise.
    pub seed: u64,
}

impl PolicyFile {
    /// What is read. What readers of an older format would overlook makes a file one of a newer: the second
    /// may have `delta_actions` or `resize`, the third `history`, `max_text_tokens`, `parts`, or no state;
    /// the fourth another head than a flow-matching expert.
    pub const FORMATS: [u32; 4] = [1, 2, 3, 4];
    /// The file's name in a run's directory.
    pub const PATH: &str = "policy.json";

    /// The file of the run that this data set was opened for, whose model's samples have these sizes.
    pub(in crate::vla_flow) fn from_dataset(dataset: &Dataset, dims: SampleDims) -> Self {
        let settings = &dataset.settings;
        let frames = settings.observation.frames();
        let (own, padded) = (dataset.dims, PaddedSizes { state: dims.state / frames, action: dims.action });
        let modes = settings.data.normalization;
        let feature = |numeric: &Numeric, normalization| {
            let part =
                |part: &FeatureColumn| FeaturePart { name: part.name.clone(), shape: part.shape.clone() };
            let parts: Vec<_> = numeric.parts.iter().map(part).collect();
            let (shape, parts) = match &parts[..] {
                [only] => (only.shape.clone(), Vec::new()),
                _ => (vec![numeric.width], parts),
            };
            let names = numeric.element_names();
            NumericFeature { name: numeric.name.clone(), shape, names, normalization, parts, rows: None }
        };
        let sensor = |sensor: &Numeric| {
            let mut feature = feature(sensor, modes.sensor);
            feature.rows = settings.data.sensor.as_ref().and_then(|sensor| sensor.window);
            // A window that is read row by row is given as one.
            if feature.rows.is_some() {
                feature.shape = vec![own.sensor_window, own.sensor_channels];
                feature.names.clear();
            }
            feature
        };
        let (state, action) = (&dataset.state, &dataset.action);
        let joined = [state, action].iter().any(|of| of.parts.len() > 1);
        let format = match &settings.observation {
            _ if !settings.expert.head.is_default() => 4,
            observation if *observation != Observation::default() || joined || state.is_none() => 3,
            _ if dataset.recipe.deltas.any() || !is_smart(&settings.data.resize) => 2,
            _ => 1,
        };
        let camera = |camera: &super::dataset::Camera| {
            let (height, width) = camera.size;
            CameraInput { name: camera.name.clone(), height, width }
        };
        Self {
            format,
            base_model: settings.model.path.clone(),
            cameras: dataset.cameras.iter().map(camera).collect(),
            state: (!state.is_none()).then(|| feature(state, modes.state)),
            sensor: dataset.sensor.as_ref().map(sensor),
            action: feature(action, modes.action),
            chunk: Chunk {
                horizon: dataset.dims.horizon,
                action_stride: settings.data.action_stride,
                delta_actions: settings.data.delta_actions.clone(),
            },
            prompt: dataset.prompt_template(),
            history: settings.observation.history.clone(),
            max_text_tokens: settings.observation.max_text_tokens,
            resize: settings.data.resize,
            pixels: dataset.images.pixel_bounds(),
            flow: Flow {
                head: settings.expert.head,
                convention: settings.expert.convention,
                sampling_steps: settings.expert.sampling_steps,
                heads: settings.expert.heads,
                seed: dataset.seed(),
            },
            padded: ((own.state, own.action) != (dims.state, dims.action)).then_some(padded),
            observation: (settings.serve != Serve::default())
                .then(|| settings.serve.with_names_of(&settings.data)),
        }
    }

    /// As JSON text.
    pub(super) fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).expect("string keys, numbers and text")
    }
}

fn one() -> usize {
    1
}

fn is_smart(fit: &Fit) -> bool {
    *fit == Fit::SmartResize
}

fn is_one(stride: &usize) -> bool {
    *stride == 1
}

impl NumericFeature {
    /// Elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }
}
