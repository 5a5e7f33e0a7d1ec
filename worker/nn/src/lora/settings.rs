//! What a run file says of adapters, in PEFT's terms.

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
    /// A PEFT directory whose weights to start from instead of `A ~ U, B = 0`. Its rank, alpha and targets
    /// are not taken over: those of this section must give every module the same adapter.
    #[serde(default)]
    pub init_from: Option<String>,
}

fn default_rank() -> usize {
    16
}
fn default_alpha() -> f64 {
    32.0
}

/// PEFT's `target_modules`: a list is matched exactly or as a `.`-suffix, a string is a full-match regular
/// expression.
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
