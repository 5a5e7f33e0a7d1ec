//! The kinds of heads that make actions of hidden states: where a run's settings and sizes become one.

use coxswain_nn::params::TrainableLayout;

use super::{
    config::{HeadKind, VlaSettings},
    data::SampleDims,
    expert::{ActionExpert, ExpertShape, Learning},
    oft::{OftHead, OftShape},
};

/// Sizes of a head.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum HeadShape {
    /// Of a flow-matching expert.
    Flow(ExpertShape),
    /// Of an MLP on action tokens.
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
    /// Of a run whose samples have these sizes, on hidden states of this width.
    pub fn of(vla: &VlaSettings, context: usize, dims: SampleDims) -> Self {
        let SampleDims { horizon, action, .. } = dims;
        match vla.expert.head {
            HeadKind::Flow => Self::Flow(ExpertShape::of(vla, context, dims)),
            HeadKind::Oft => Self::Oft(OftShape { context, horizon, action }),
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
