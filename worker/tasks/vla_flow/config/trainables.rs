//! What trains besides adapters: the sections `expert` and `sensor`, and all learning rates.

use serde::{Deserialize, Serialize};

/// The flow-matching action expert: DiT blocks that cross-attend the vision-language hidden states.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Expert {
    /// Model width.
    pub width: usize,
    /// DiT blocks; even ones cross-attend, odd ones self-attend.
    pub layers: usize,
    /// Attention heads; divides `width`.
    pub heads: usize,
    /// Which end of the flow is noise.
    pub convention: FlowConvention,
    /// Independent (noise, time) draws per vision-language forward, `R`.
    pub repeated_noise: usize,
    /// Euler steps when sampling actions.
    pub sampling_steps: usize,
    /// Whether it trains. One that does not is brought by `train.init_from`, and has neither gradients nor
    /// moments.
    pub train: bool,
}

impl Default for Expert {
    fn default() -> Self {
        Self {
            width: 384,
            layers: 4,
            heads: 6,
            convention: FlowConvention::NoiseAtZero,
            repeated_noise: 1,
            sampling_steps: 10,
            train: true,
        }
    }
}

/// The two sign conventions of flow matching in the field.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FlowConvention {
    /// GR00T and starVLA: `x_t = (1-t) eps + t A`, target `A - eps`, sampling goes from t = 0 to 1.
    #[default]
    NoiseAtZero,
    /// openpi, SmolVLA and LeRobot: `x_t = t eps + (1-t) A`, target `eps - A`, sampling goes from t = 1 to 0.
    NoiseAtOne,
}

/// The sensor encoder: a window of readings becomes tokens for the expert.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Sensor {
    /// Hidden width of the encoder; its tokens have the expert's width.
    pub width: usize,
    /// Tokens the window is pooled to.
    pub tokens: usize,
}

impl Default for Sensor {
    fn default() -> Self {
        Self { width: 64, tokens: 4 }
    }
}

/// Peak learning rate of each group of trainables.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LearningRates {
    /// LoRA matrices of the vision-language model.
    pub lora: f64,
    /// What of the vision-language model trains in full (`model.train`).
    pub base: f64,
    /// The action expert.
    pub expert: f64,
    /// The sensor encoder.
    pub sensor: f64,
}

impl Default for LearningRates {
    fn default() -> Self {
        Self { lora: 1e-5, base: 1e-5, expert: 1e-4, sensor: 1e-4 }
    }
}
