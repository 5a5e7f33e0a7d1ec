//! Sizes of an action expert.

use coxswain_models::vision_language::ModelOutline;

use crate::vla_flow::{
    config::{ActionEncoder, HeadKind, Projection, VlaSettings},
    data::SampleDims,
};

/// What a head has to know of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelSizes {
    /// Values of its hidden states.
    pub width: usize,
    /// Decoder layers.
    pub layers: usize,
}

impl From<&ModelOutline> for ModelSizes {
    fn from(model: &ModelOutline) -> Self {
        Self { width: model.hidden_size, layers: model.layers }
    }
}

/// Sizes of an expert.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpertShape {
    /// Model width.
    pub width: usize,
    /// Blocks.
    pub layers: usize,
    /// Attention heads; divides `width`.
    pub heads: usize,
    /// Width of the hidden states it attends to.
    pub context: usize,
    /// Length of the state; 0 without one.
    pub state: usize,
    /// Sensor tokens; 0 without a sensor.
    pub sensor_tokens: usize,
    /// Actions per chunk.
    pub horizon: usize,
    /// Length of an action.
    pub action: usize,
    /// What it is made of.
    pub form: ExpertForm,
}

/// What an expert is made of, where experts differ.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpertForm {
    /// Whether the flow's time is mixed into action tokens.
    pub time_in_actions: bool,
    /// Hidden width of the state's encoder; none for a linear one.
    pub state_hidden: Option<usize>,
    /// Hidden width of the decoder of actions; none for a linear one.
    pub decoder_hidden: Option<usize>,
    /// Whether the hidden states are normed first.
    pub feature_norm: bool,
    /// Learned tokens between the state's and the actions'.
    pub future_tokens: usize,
    /// Fraction of what each half of a block adds that is dropped in training.
    pub dropout: f64,
    /// Whether each block attends to a layer of the language model of its own, and nothing else.
    pub layerwise: bool,
}

impl ExpertForm {
    /// Linear ends, and nothing of the rest.
    pub const PLAIN: Self = Self {
        time_in_actions: false,
        state_hidden: None,
        decoder_hidden: None,
        feature_norm: false,
        future_tokens: 0,
        dropout: 0.0,
        layerwise: false,
    };
}

impl ExpertShape {
    /// The expert of a run whose samples have these sizes, on a model of such.
    pub fn from_settings(vla: &VlaSettings, model: ModelSizes, dims: SampleDims) -> Self {
        let expert = &vla.expert;
        let layerwise = expert.head == HeadKind::Layerwise;
        let hidden = |projection| (projection == Projection::Mlp).then_some(expert.ends_width);
        Self {
            width: expert.width,
            layers: if layerwise { model.layers } else { expert.layers },
            heads: expert.heads,
            context: model.width,
            // A layerwise expert has no token of the state: the prompt tells it.
            state: if layerwise { 0 } else { dims.state },
            sensor_tokens: if dims.sensor_window > 0 { vla.sensor.tokens } else { 0 },
            horizon: dims.horizon,
            action: dims.action,
            form: ExpertForm {
                time_in_actions: expert.action_encoder == ActionEncoder::TimeMlp,
                state_hidden: hidden(expert.state_encoder),
                decoder_hidden: hidden(expert.action_decoder),
                feature_norm: expert.feature_norm,
                future_tokens: expert.future_tokens,
                // One that is brought is as it is in use.
                dropout: if expert.train { expert.dropout } else { 0.0 },
                layerwise,
            },
        }
    }

    /// Tokens of one draw.
    pub fn tokens(&self) -> usize {
        self.placed_tokens() + self.form.future_tokens
    }

    /// Tokens that have a learned position: all but the future tokens, which are learned themselves.
    pub fn placed_tokens(&self) -> usize {
        usize::from(self.state > 0) + self.sensor_tokens + self.horizon
    }
}
