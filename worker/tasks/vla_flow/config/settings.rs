//! The keys with their types.

use coxswain_models::pretrained::settings::Model;
use coxswain_nn::lora::Lora;
use coxswain_proto::{config::SettingsError, run_spec::RunSpec};
use serde::{Deserialize, Serialize};

use super::{
    data::Data,
    observation::Observation,
    serve::Serve,
    trainables::{Expert, LearningRates, Sensor},
};

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
    /// What the policy sees beside one frame of the features.
    #[serde(default)]
    pub observation: Observation,
    /// Learning rates.
    #[serde(default)]
    pub optimizer: Optimizer,
    /// Names on the wire, where the policy is served.
    #[serde(default)]
    pub serve: Serve,
}

/// The task's part of the section `optimizer`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Optimizer {
    /// Peak learning rate of each group of trainables.
    pub lr: LearningRates,
}

impl VlaSettings {
    /// The settings of a specification; refused if they are another task's, or of other types. Their rules
    /// are the schema's to check.
    pub fn from_spec(spec: &RunSpec) -> Result<Self, SettingsError> {
        spec.settings()
    }
}

/// The task's keys of a specification, for tests and benchmarks that have written it: panics if they are not
/// there.
pub trait VlaSpec {
    /// With their types.
    fn vla(&self) -> VlaSettings;

    /// To be changed; written back when the value is dropped.
    fn vla_mut(&mut self) -> VlaMut<'_>;
}

impl VlaSpec for RunSpec {
    fn vla(&self) -> VlaSettings {
        VlaSettings::from_spec(self).unwrap_or_else(|error| panic!("{error}"))
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
