//! What trains besides adapters: the sections `expert` and `sensor`, and all learning rates.

use serde::{Deserialize, Serialize};

/// What makes actions of the vision-language hidden states: by default a flow-matching expert of DiT blocks
/// that cross-attend them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(from = "GivenExpert")]
pub struct Expert {
    /// Whose shapes the keys have that are not given.
    pub preset: Option<Preset>,
    /// Which kind of head it is. One without a flow has none of the other keys but `train`.
    pub head: HeadKind,
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
    /// What makes tokens of noisy actions.
    pub action_encoder: ActionEncoder,
    /// What makes a token of the state.
    pub state_encoder: Projection,
    /// What makes velocities of the last tokens.
    pub action_decoder: Projection,
    /// Hidden width of the state's encoder and the actions' decoder, where they are MLPs.
    pub ends_width: usize,
    /// Whether the hidden states go through a layer norm with gain and bias of its own first.
    pub feature_norm: bool,
    /// Learned tokens between the state's and the actions'.
    pub future_tokens: usize,
    /// Fraction of what each half of a block adds that is dropped in training.
    pub dropout: f64,
    /// What the loss of a policy of LeRobot's counts.
    pub loss: PolicyLoss,
}

/// The keys as they are given: what is absent is the preset's.
#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct GivenExpert {
    preset: Option<Preset>,
    head: Option<HeadKind>,
    width: Option<usize>,
    layers: Option<usize>,
    heads: Option<usize>,
    convention: Option<FlowConvention>,
    repeated_noise: Option<usize>,
    sampling_steps: Option<usize>,
    train: Option<bool>,
    action_encoder: Option<ActionEncoder>,
    state_encoder: Option<Projection>,
    action_decoder: Option<Projection>,
    ends_width: Option<usize>,
    feature_norm: Option<bool>,
    future_tokens: Option<usize>,
    dropout: Option<f64>,
    loss: Option<PolicyLoss>,
}

impl From<GivenExpert> for Expert {
    fn from(given: GivenExpert) -> Self {
        let base = given.preset.map_or_else(Self::default, Self::from_preset);
        Self {
            preset: given.preset,
            head: given.head.unwrap_or(base.head),
            width: given.width.unwrap_or(base.width),
            layers: given.layers.unwrap_or(base.layers),
            heads: given.heads.unwrap_or(base.heads),
            convention: given.convention.unwrap_or(base.convention),
            repeated_noise: given.repeated_noise.unwrap_or(base.repeated_noise),
            sampling_steps: given.sampling_steps.unwrap_or(base.sampling_steps),
            train: given.train.unwrap_or(base.train),
            action_encoder: given.action_encoder.unwrap_or(base.action_encoder),
            state_encoder: given.state_encoder.unwrap_or(base.state_encoder),
            action_decoder: given.action_decoder.unwrap_or(base.action_decoder),
            ends_width: given.ends_width.unwrap_or(base.ends_width),
            feature_norm: given.feature_norm.unwrap_or(base.feature_norm),
            future_tokens: given.future_tokens.unwrap_or(base.future_tokens),
            dropout: given.dropout.unwrap_or(base.dropout),
            loss: given.loss.unwrap_or(base.loss),
        }
    }
}

impl Expert {
    /// The action head of that project.
    pub(super) fn from_preset(preset: Preset) -> Self {
        let both = Self {
            preset: Some(preset),
            layers: 16,
            convention: FlowConvention::NoiseAtZero,
            sampling_steps: 4,
            action_encoder: ActionEncoder::TimeMlp,
            state_encoder: Projection::Mlp,
            action_decoder: Projection::Mlp,
            ends_width: 1024,
            future_tokens: 32,
            dropout: 0.2,
            ..Self::default()
        };
        match preset {
            Preset::Groot => Self { width: 1536, heads: 32, feature_norm: true, ..both },
            Preset::Starvla => Self { width: 768, heads: 12, repeated_noise: 8, ..both },
            Preset::QwenPi => Self {
                head: HeadKind::Layerwise,
                width: 1024,
                heads: 16,
                layers: Self::default().layers,
                state_encoder: Projection::Linear,
                repeated_noise: 2,
                ..both
            },
            Preset::Oft => Self { preset: Some(preset), head: HeadKind::Oft, ..Self::default() },
        }
    }
}

/// Whose action head gives the defaults.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Preset {
    /// GR00T N1.5 (`gr00t/model/action_head` of NVIDIA/Isaac-GR00T).
    Groot,
    /// QwenGR00T with DiT-B (`starVLA/model/modules/action_model/GR00T_ActionHeader.py`).
    Starvla,
    /// QwenPI_v3 (`starVLA/model/framework/VLM4A/QwenPI_v3.py`).
    QwenPi,
    /// QwenOFT, the head of StarVLA-alpha (`starVLA/model/framework/VLM4A/QwenOFT.py`, arXiv 2604.11757).
    Oft,
}

/// What makes actions of hidden states.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HeadKind {
    /// A flow-matching expert, which attends to all of them.
    #[default]
    Flow,
    /// A flow-matching expert with a block for each layer of the language model, which attends to that
    /// layer's hidden states.
    Layerwise,
    /// An MLP that reads those of action tokens at the end of the prompt.
    Oft,
}

impl HeadKind {
    /// Whether it follows a flow from noise to actions.
    pub fn is_flow(&self) -> bool {
        *self != Self::Oft
    }

    /// Whether it is the one that runs have by default.
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

/// What makes tokens of noisy actions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ActionEncoder {
    /// One linear layer.
    #[default]
    Linear,
    /// `W_3 silu(W_2 [W_1 a; sinusoids(t)])`, as in GR00T, starVLA and pi0.
    TimeMlp,
}

/// One linear layer or two.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Projection {
    /// One.
    #[default]
    Linear,
    /// Two with a ReLU between, as in GR00T and starVLA.
    Mlp,
}

impl Default for Expert {
    fn default() -> Self {
        Self {
            preset: None,
            head: HeadKind::Flow,
            width: 384,
            layers: 4,
            heads: 6,
            convention: FlowConvention::NoiseAtZero,
            repeated_noise: 1,
            sampling_steps: 10,
            train: true,
            action_encoder: ActionEncoder::Linear,
            state_encoder: Projection::Linear,
            action_decoder: Projection::Linear,
            ends_width: 1024,
            feature_norm: false,
            future_tokens: 0,
            dropout: 0.0,
            loss: PolicyLoss::Lerobot,
        }
    }
}

/// The dimensions of an action that the loss of pi0 and pi0.5 is the mean over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PolicyLoss {
    /// The dimensions that the data set has (`lerobot/policies/pi0/modeling_pi0.py`).
    #[default]
    Lerobot,
    /// All that the policy pads them to (`src/openpi/models/pi0.py`).
    Openpi,
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
