//! What trains: the sections `lora`, `expert` and `sensor`, and their learning rates.

use serde::{Deserialize, Serialize};

use super::patterns::Patterns;

/// LoRA in PEFT's terms (<https://huggingface.co/docs/peft>, `LoraConfig`).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Lora {
    /// Rank `r`.
    #[serde(default = "default_rank")]
    pub rank: usize,
    /// `lora_alpha`; the update is scaled by `alpha / r`, or `alpha / sqrt(r)` with rsLoRA.
    #[serde(default = "default_alpha")]
    pub alpha: f64,
    /// Scale by `alpha / sqrt(r)` (arXiv 2312.03732).
    #[serde(default)]
    pub rslora: bool,
    /// Which linears get an adapter.
    #[serde(default)]
    pub targets: LoraTargets,
    /// Module-name pattern to rank, as PEFT's `rank_pattern`: the first that matches a module decides.
    #[serde(default)]
    pub rank_pattern: Patterns<usize>,
    /// Module-name pattern to alpha, as PEFT's `alpha_pattern`: the first that matches a module decides.
    #[serde(default)]
    pub alpha_pattern: Patterns<f64>,
    /// A PEFT directory whose weights to start from instead of `A ~ U, B = 0`. Its rank, alpha and targets are not taken over: those of
    /// this section must give every module the same adapter.
    #[serde(default)]
    pub init_from: Option<String>,
}

fn default_rank() -> usize {
    16
}
fn default_alpha() -> f64 {
    32.0
}

/// PEFT's `target_modules`: a list is matched exactly or as a `.`-suffix, a string is a full-match regular expression.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged, expecting = "expected a list of module names, or one regular expression as text")]
pub enum LoraTargets {
    /// `["q_proj", "v_proj"]`
    Suffixes(Vec<String>),
    /// `".*language_model.*\\.(q_proj|v_proj)"`, or `"all-linear"`.
    Regex(String),
}

impl Default for LoraTargets {
    /// Every linear of the language model's attention and MLP; the vision tower stays frozen.
    fn default() -> Self {
        Self::Regex(
            r"model\.language_model\.layers\.\d+\.(self_attn\.(q|k|v|o)_proj|mlp\.(gate|up|down)_proj)"
                .into(),
        )
    }
}

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
    /// The action expert.
    pub expert: f64,
    /// The sensor encoder.
    pub sensor: f64,
}

impl Default for LearningRates {
    fn default() -> Self {
        Self { lora: 1e-5, expert: 1e-4, sensor: 1e-4 }
    }
}
