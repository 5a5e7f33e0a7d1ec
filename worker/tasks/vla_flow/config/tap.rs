//! Where features are taken, as `cache.tap` says it.

use coxswain_proto::run_spec;
use serde::{Deserialize, Serialize};

/// Where in the model features are taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TapSetting {
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

impl TryFrom<&run_spec::Tap> for TapSetting {
    type Error = serde_json::Error;

    fn try_from(tap: &run_spec::Tap) -> Result<Self, Self::Error> {
        Self::deserialize(&tap.0)
    }
}

impl From<TapSetting> for run_spec::Tap {
    fn from(tap: TapSetting) -> Self {
        Self(serde_json::to_value(tap).expect("a name, or a name with a number"))
    }
}
