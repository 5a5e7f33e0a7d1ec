//! Sizes of an action expert.

use crate::vla_flow::{config::VlaSettings, data::SampleDims};

/// Sizes of an expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertShape {
    /// Model width.
    pub width: usize,
    /// Blocks.
    pub layers: usize,
    /// Attention heads; divides `width`.
    pub heads: usize,
    /// Width of the hidden states it attends to.
    pub context: usize,
    /// Length of the state.
    pub state: usize,
    /// Sensor tokens; 0 without a sensor.
    pub sensor_tokens: usize,
    /// Actions per chunk.
    pub horizon: usize,
    /// Length of an action.
    pub action: usize,
}

impl ExpertShape {
    /// Of a run whose samples have these sizes, on hidden states of this width.
    pub fn of(vla: &VlaSettings, context: usize, dims: SampleDims) -> Self {
        Self {
            width: vla.expert.width,
            layers: vla.expert.layers,
            heads: vla.expert.heads,
            context,
            state: dims.state,
            sensor_tokens: if dims.sensor_window > 0 { vla.sensor.tokens } else { 0 },
            horizon: dims.horizon,
            action: dims.action,
        }
    }

    /// Tokens of one draw.
    pub fn tokens(&self) -> usize {
        1 + self.sensor_tokens + self.horizon
    }
}
