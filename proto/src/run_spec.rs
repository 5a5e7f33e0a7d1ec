//! The run specification: everything a run is, as one checked value.
//!
//! A YAML file (plus dotted overrides) becomes a [`RunSpec`] in two steps (`config`): unknown keys and wrong types are refused,
//! then [`RunSpec::check`] refuses values that contradict each other. Coordinator and workers only ever see a checked spec; it
//! travels to workers as JSON inside `coxswain.v1.RunSpecDocument`.
//!
//! Nothing here touches the file system: whether paths exist and agree with each other is for the worker's own checks.

mod cache;
mod data;
mod patterns;
mod resources;
mod trainables;
mod training;

use serde::{Deserialize, Serialize};

pub use self::{
    cache::{Cache, CacheDtype, CacheMode, Span, Tap},
    data::{Data, NormMode, Normalization},
    patterns::Patterns,
    resources::{Collectives, DeviceChoice, Faults, Launch, Memory, Offload},
    trainables::{Expert, FlowConvention, Lora, LoraTargets, Sensor},
    training::{Eval, LearningRates, Optimizer, Recompute, ReduceDtype, Schedule, Train},
};

/// One run: model, what trains in it, data, optimizer, schedule, and how it is launched.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunSpec {
    /// Name, output directory and seed.
    pub run: Run,
    /// The pretrained vision-language model.
    pub model: Model,
    /// Low-rank adapters; absent means that the vision-language model stays frozen.
    #[serde(default)]
    pub lora: Option<Lora>,
    /// The flow-matching action expert.
    #[serde(default)]
    pub expert: Expert,
    /// The sensor encoder; used only when `data.sensor` names a feature.
    #[serde(default)]
    pub sensor: Sensor,
    /// The LeRobot data set and how samples are cut from it.
    pub data: Data,
    /// Steps, batch, recompute, checkpoints.
    pub train: Train,
    /// AdamW and its schedule.
    #[serde(default)]
    pub optimizer: Optimizer,
    /// Held-out evaluation before the first step and after the last.
    #[serde(default)]
    pub eval: Eval,
    /// Features of the vision-language model, kept instead of computed again.
    #[serde(default)]
    pub cache: Cache,
    /// Peak-memory accounting, and what is kept elsewhere than where a rank computes.
    #[serde(default)]
    pub memory: Memory,
    /// What is kept in store for a lost worker.
    #[serde(default)]
    pub faults: Faults,
    /// Processes and threads; the command line wins over it.
    #[serde(default)]
    pub launch: Launch,
}

/// Name, output directory and seed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Run {
    /// Used in logs and file names: letters, digits, `-`, `_`, `.`.
    pub name: String,
    /// Everything the run writes goes below it.
    pub output_dir: String,
    /// Keys every random draw of the run.
    #[serde(default)]
    pub seed: u64,
}

/// The pretrained vision-language model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Model {
    /// A Hugging Face directory of a Qwen2.5-VL checkpoint.
    pub path: String,
    /// How frozen weights are kept in memory.
    #[serde(default)]
    pub weights_dtype: WeightsDtype,
    /// How precise the values are that blocks hand to each other, and that layer recompute keeps for the backward pass.
    #[serde(default)]
    pub activations_dtype: ActivationsDtype,
}

/// How frozen weights are kept in memory. Trainables always have fp32 master weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WeightsDtype {
    /// 4 bytes a weight.
    #[default]
    Float32,
    /// 2 bytes a weight; products still accumulate in fp32.
    Bfloat16,
}

/// How precise the values are that blocks hand to each other, and that layer recompute keeps for the backward pass.
///
/// It is part of what is computed, in training as in evaluation and whatever `train.recompute` is, so that no recompute mode changes
/// a gradient. Products, attention, norms and all gradients are fp32 with either.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ActivationsDtype {
    /// As they are computed; kept in 4 bytes.
    #[default]
    Float32,
    /// Rounded to bfloat16; what recompute keeps takes 2 bytes.
    Bfloat16,
}
