//! What a run file says of adapters, in PEFT's terms.

use coxswain_proto::config::Findings;
use serde::{Deserialize, Serialize};

use super::patterns::Patterns;

/// LoRA in PEFT's terms (<https://huggingface.co/docs/peft>, `LoraConfig`).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Lora {
    /// Rank `r`.
    pub rank: usize,
    /// `lora_alpha`; the update is scaled by `alpha / r`, or `alpha / sqrt(r)` with rsLoRA.
    pub alpha: f64,
    /// Scale by `alpha / sqrt(r)` (arXiv 2312.03732).
    pub rslora: bool,
    /// Which linears get an adapter.
    pub targets: LoraTargets,
    /// Module-name pattern to rank, as PEFT's `rank_pattern`: the first that matches a module decides.
    pub rank_pattern: Patterns<usize>,
    /// Module-name pattern to alpha, as PEFT's `alpha_pattern`: the first that matches a module decides.
    pub alpha_pattern: Patterns<f64>,
    /// `lora_dropout`: fraction of the input of `A` that is dropped in training, and only there.
    pub dropout: f64,
    /// Magnitudes and directions of the adapted weights train apart (DoRA, arXiv 2402.09353).
    pub use_dora: bool,
    /// Which biases of the model train beside the adapters.
    pub bias: Bias,
    /// What `targets` matches and gets no adapter all the same.
    pub exclude_modules: Option<LoraTargets>,
    /// Adapters only in layers of these numbers; in all if it is empty.
    pub layers_to_transform: Vec<u64>,
    /// What the layers are called that `layers_to_transform` counts; every numbered list if it is empty.
    pub layers_pattern: Vec<String>,
    /// A PEFT directory whose weights to start from instead of `A ~ U, B = 0`. Its rank, alpha and targets
    /// are not taken over: those of this section must give every module the same adapter.
    pub init_from: Option<String>,
}

impl Default for Lora {
    fn default() -> Self {
        Self {
            rank: 16,
            alpha: 32.0,
            rslora: false,
            targets: LoraTargets::default(),
            rank_pattern: Patterns::default(),
            alpha_pattern: Patterns::default(),
            dropout: 0.0,
            use_dora: false,
            bias: Bias::None,
            exclude_modules: None,
            layers_to_transform: Vec::new(),
            layers_pattern: Vec::new(),
            init_from: None,
        }
    }
}

impl Lora {
    /// Rules, whatever the model.
    pub fn check(&self, f: &mut Findings) {
        f.at_least_one("lora.rank", self.rank);
        f.in_range("lora.alpha", self.alpha, self.alpha > 0.0, "above 0");
        match &self.targets {
            LoraTargets::Suffixes(names) => f.require(
                !names.is_empty() && names.iter().all(|name| !name.trim().is_empty()),
                "lora.targets",
                "is empty or has an empty name",
                "list module names, for instance `[q_proj, v_proj]`; to train without LoRA, remove the section `lora`",
            ),
            LoraTargets::Regex(pattern) => check_pattern("lora.targets", pattern, f),
        }
        for (pattern, rank) in self.rank_pattern.iter() {
            check_pattern("lora.rank_pattern", pattern, f);
            f.require(
                *rank >= 1,
                "lora.rank_pattern",
                format_args!("rank of `{pattern}` must be at least 1"),
                "remove the pattern, or keep its modules out of `lora.targets`",
            );
        }
        for (pattern, alpha) in self.alpha_pattern.iter() {
            check_pattern("lora.alpha_pattern", pattern, f);
            f.in_range("lora.alpha_pattern", *alpha, *alpha > 0.0, "above 0");
        }
        f.in_range("lora.dropout", self.dropout, (0.0..1.0).contains(&self.dropout), "from 0 to below 1");
        if let Some(LoraTargets::Regex(pattern)) = &self.exclude_modules {
            check_pattern("lora.exclude_modules", pattern, f);
        }
        f.require(
            self.layers_to_transform.is_empty() || matches!(self.targets, LoraTargets::Suffixes(_)),
            "lora.layers_to_transform",
            "is given, but `lora.targets` is a regular expression, which already selects layers",
            "list the targets, for instance `[q_proj, v_proj]`, or put the layers into the expression",
        );
        for pattern in &self.layers_pattern {
            check_pattern("lora.layers_pattern", pattern, f);
        }
        f.require(
            self.layers_pattern.is_empty() || !self.layers_to_transform.is_empty(),
            "lora.layers_pattern",
            "is given without `lora.layers_to_transform`",
            "give both, or neither",
        );
        if let Some(path) = &self.init_from {
            f.named("lora.init_from", path, "name a PEFT directory or remove the key");
        }
    }
}

/// Which biases of the model train beside adapters: PEFT's `bias`, in its spelling.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Bias {
    /// None.
    #[default]
    None,
    /// Every bias of the model, vision tower included.
    All,
    /// Biases of adapted modules.
    LoraOnly,
}

impl Bias {
    /// As PEFT spells it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::All => "all",
            Self::LoraOnly => "lora_only",
        }
    }
}

/// Compiles as the adapters will: with `fancy-regex`, because PEFT's patterns are Python's.
pub(super) fn check_pattern(path: &str, pattern: &str, f: &mut Findings) {
    if let Err(error) = fancy_regex::Regex::new(pattern) {
        let first = error.to_string().lines().last().unwrap_or_default().trim().to_owned();
        f.require(
            false,
            path,
            format_args!("`{pattern}` is not a regular expression: {first}"),
            "write it as for Python's `re`, and quote it in YAML",
        );
    }
    f.named(path, pattern, "give a pattern");
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
