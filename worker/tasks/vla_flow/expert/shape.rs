//! Sizes of an action expert.

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
    /// Tokens of one draw.
    pub fn tokens(&self) -> usize {
        1 + self.sensor_tokens + self.horizon
    }
}
