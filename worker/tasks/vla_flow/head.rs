//! The kinds of heads that make actions of hidden states: where a run's settings and sizes become one.

use coxswain_models::vision_language::{ModelOutline, Tap};
use coxswain_nn::params::TrainableLayout;

use super::{
    config::{HeadKind, VlaSettings},
    data::SampleDims,
    expert::{ActionExpert, ExpertShape, Learning, ModelSizes},
    oft::{OftHead, OftShape},
};

/// Where a head reads hidden states, in order: the last of them, or what every layer gives, as Transformers
/// 4.57 lists it, DeepStack's streams added.
pub fn reads(vla: &VlaSettings, model: &ModelOutline) -> Vec<Tap> {
    let below = if vla.expert.head == HeadKind::Layerwise { 1..model.layers } else { 0..0 };
    below.map(Tap::Layer).chain([Tap::Final]).collect()
}

/// The deepest tap from which all that a head reads can be computed. Kept features are named by the task's
/// text, so that what depends on a state that the prompt tells is not kept.
pub fn deepest_kept(vla: &VlaSettings, model: &ModelOutline) -> Tap {
    let tells = vla.expert.head == HeadKind::Layerwise && vla.data.has_state();
    if tells { Tap::Vision } else { reads(vla, model)[0] }
}

/// Sizes of a head.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum HeadShape {
    /// Sizes of a flow-matching expert.
    Flow(ExpertShape),
    /// Sizes of an MLP on action tokens.
    Oft(OftShape),
}

/// A head: where its parameters lie in the flat parameter buffer.
#[derive(Clone, Debug)]
pub enum ActionHead {
    /// A flow-matching expert.
    Flow(Box<ActionExpert>),
    /// An MLP on action tokens.
    Oft(Box<OftHead>),
}

impl HeadShape {
    /// The head of a run whose samples have these sizes, on a model of such.
    pub fn from_settings(vla: &VlaSettings, model: ModelSizes, dims: SampleDims) -> Self {
        let SampleDims { horizon, action, .. } = dims;
        match vla.expert.head {
            HeadKind::Flow | HeadKind::Layerwise => Self::Flow(ExpertShape::from_settings(vla, model, dims)),
            HeadKind::Oft => Self::Oft(OftShape { context: model.width, horizon, action }),
        }
    }

    /// Registers all parameters under `expert.…`.
    pub fn register(self, layout: &mut TrainableLayout, learning: Learning<'_>) -> ActionHead {
        match self {
            Self::Flow(shape) => ActionHead::Flow(Box::new(ActionExpert::register(layout, shape, learning))),
            Self::Oft(shape) => ActionHead::Oft(Box::new(OftHead::register(layout, shape, learning))),
        }
    }
}

impl From<ExpertShape> for HeadShape {
    fn from(shape: ExpertShape) -> Self {
        Self::Flow(shape)
    }
}
