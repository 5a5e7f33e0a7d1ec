//! An observation, prepared: what the model takes, and what its answer is relative to.

use coxswain_task::Sample as AnySample;

use crate::vla_flow::data::Sample;

/// A request on its way to the model.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct ObservedSample {
    /// What the model takes.
    pub(super) sample: Sample,
    /// The part of its velocity by which each step of the chunk moves, `[horizon]`.
    pub(super) strengths: Vec<f32>,
    /// What is added to the values of every action that it gives, `[action]`.
    pub(super) offset: Vec<f32>,
}

impl AnySample for ObservedSample {
    fn index(&self) -> u64 {
        self.sample.index
    }
}
