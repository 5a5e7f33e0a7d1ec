//! What was found on held-out samples.

use coxswain_nn::lora::Patterns;
use serde::{Deserialize, Serialize};

/// Most measures of a task.
pub const MAX_MEASURES: usize = 8;

/// What was found on held-out samples: the mean of each of the task's measures.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HeldOutError {
    /// Held-out samples looked at.
    pub samples: u64,
    /// By name, in the task's order.
    #[serde(flatten)]
    pub measures: Patterns<f64>,
    /// Held-out samples that should have been looked at and cannot be read.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub unreadable: u64,
}

impl HeldOutError {
    /// The value of a measure; none if the task has none of this name.
    pub fn of(&self, measure: &str) -> Option<f64> {
        self.measures.iter().find(|(name, _)| *name == measure).map(|(_, value)| *value)
    }
}

fn is_zero(count: &u64) -> bool {
    *count == 0
}
