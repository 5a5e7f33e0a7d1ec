//! The keys of the task `vla_flow`: a vision-language-action policy of a Qwen2.5-VL model and a flow-matching action expert.

mod check;
mod data;
mod trainables;

use serde::{Deserialize, Serialize};

pub use self::{
    data::{Data, Normalization},
    trainables::{Expert, FlowConvention, LearningRates, Sensor},
};
use coxswain_nn::{
    dtypes::{ActivationsDtype, WeightsDtype},
    lora::Lora,
};
use coxswain_proto::{
    config::{Findings, TaskSchema, TaskSettings},
    identity::{
        Class::{Learned, LearnedInOrder, LearnedSince},
        Classes,
    },
    run_spec::RunSpec,
};

/// The keys' schema.
pub const SCHEMA: TaskSchema = TaskSchema::of::<VlaSettings>();

/// The task's keys.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct VlaSettings {
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
    /// How samples are cut from a LeRobot data set.
    pub data: Data,
    /// Learning rates.
    #[serde(default)]
    pub optimizer: Optimizer,
}

impl VlaSettings {
    /// Those of a specification that the task's schema wrote, or checked.
    pub fn of(spec: &RunSpec) -> Self {
        spec.settings().unwrap_or_else(|error| panic!("a run of this task has been checked: {error}"))
    }
}

/// The task's keys of a specification.
pub trait VlaSpec {
    /// With their types.
    fn vla(&self) -> VlaSettings;

    /// To be changed; written back when the value is dropped.
    fn vla_mut(&mut self) -> VlaMut<'_>;
}

impl VlaSpec for RunSpec {
    fn vla(&self) -> VlaSettings {
        VlaSettings::of(self)
    }

    fn vla_mut(&mut self) -> VlaMut<'_> {
        VlaMut { settings: self.vla(), spec: self }
    }
}

/// The task's keys of a specification, while they are changed.
pub struct VlaMut<'s> {
    settings: VlaSettings,
    spec: &'s mut RunSpec,
}

impl std::ops::Deref for VlaMut<'_> {
    type Target = VlaSettings;

    fn deref(&self) -> &VlaSettings {
        &self.settings
    }
}

impl std::ops::DerefMut for VlaMut<'_> {
    fn deref_mut(&mut self) -> &mut VlaSettings {
        &mut self.settings
    }
}

impl Drop for VlaMut<'_> {
    fn drop(&mut self) {
        self.spec.set_settings(&self.settings);
    }
}

/// The task's part of the section `optimizer`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Optimizer {
    /// Peak learning rate of each group of trainables.
    pub lr: LearningRates,
}

impl TaskSettings for VlaSettings {
    const TYPE: &'static str = "vla_flow";

    const IDENTITY: &'static Classes = &[
        ("model.path", Learned),
        ("model.weights_dtype", Learned),
        ("model.activations_dtype", LearnedSince("\"float32\"")),
        ("lora.rank", Learned),
        ("lora.alpha", Learned),
        ("lora.rslora", Learned),
        ("lora.targets", Learned),
        ("lora.rank_pattern", LearnedInOrder),
        ("lora.alpha_pattern", LearnedInOrder),
        ("lora.init_from", Learned),
        ("expert.width", Learned),
        ("expert.layers", Learned),
        ("expert.heads", Learned),
        ("expert.convention", Learned),
        ("expert.repeated_noise", Learned),
        ("expert.sampling_steps", Learned),
        ("sensor.width", Learned),
        ("sensor.tokens", Learned),
        ("data.cameras", Learned),
        ("data.state", Learned),
        ("data.sensor", Learned),
        ("data.action", Learned),
        ("data.horizon", Learned),
        ("data.normalization.state", Learned),
        ("data.normalization.action", Learned),
        ("data.normalization.sensor", Learned),
        ("data.prompt", Learned),
        ("data.min_pixels", Learned),
        ("data.max_pixels", Learned),
        ("optimizer.lr.lora", Learned),
        ("optimizer.lr.expert", Learned),
        ("optimizer.lr.sensor", Learned),
    ];

    fn check(&self, spec: &RunSpec, findings: &mut Findings) {
        check::check(self, spec, findings);
    }
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

/// Where in the model features are taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Tap {
    /// As deep as the mode allows.
    #[default]
    Auto,
    /// The vision tower's output, after the merger.
    Vision,
    /// The hidden states after the final norm.
    Final,
    /// The input of this decoder layer, before its norm.
    Layer(usize),
}

impl TryFrom<&coxswain_proto::run_spec::Tap> for Tap {
    type Error = serde_json::Error;

    fn try_from(tap: &coxswain_proto::run_spec::Tap) -> Result<Self, Self::Error> {
        Self::deserialize(&tap.0)
    }
}

impl From<Tap> for coxswain_proto::run_spec::Tap {
    fn from(tap: Tap) -> Self {
        Self(serde_json::to_value(tap).expect("a name, or a name with a number"))
    }
}

#[cfg(test)]
mod tests;
