//! What was found on held-out samples.

use std::collections::BTreeMap;

use coxswain_nn::lora::Patterns;
use coxswain_proto::report::Metric;
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
    /// The measures by part, where the task tells them: `mae/dim0`.
    #[serde(default, skip_serializing_if = "is_empty")]
    pub parts: Patterns<f64>,
}

impl HeldOutError {
    /// The measure that tells the best checkpoint: less is better.
    pub fn first(&self) -> Option<(&str, f64)> {
        self.measures.iter().next().map(|(name, value)| (name, *value))
    }

    /// The measures of the weights' average, beside those of the weights. Not by part: a report of both would
    /// not fit its bound.
    pub fn figures_of_average(&self) -> impl Iterator<Item = Metric> {
        self.measures.iter().map(|(name, value)| Metric::held_out(&format!("ema/{name}"), *value))
    }

    /// All figures, for every sink of a step's.
    pub fn figures(&self) -> Vec<Metric> {
        let all = self.measures.iter().chain(self.parts.iter());
        all.map(|(name, value)| Metric::held_out(name, *value)).collect()
    }

    /// The measures of each data set of a mixture in words, by its name: of the parts that are called
    /// `MEASURE/set/NAME`.
    pub fn by_set(&self) -> BTreeMap<&str, String> {
        let mut sets = BTreeMap::<_, String>::new();
        for (name, value) in self.parts.iter() {
            let Some((measure, set)) = name.split_once("/set/") else { continue };
            let words = sets.entry(set).or_default();
            let comma = if words.is_empty() { "" } else { ", " };
            words.push_str(&format!("{comma}{measure} {value:.4}"));
        }
        sets
    }

    /// The value of a measure; none if the task has none of this name.
    pub fn value(&self, measure: &str) -> Option<f64> {
        self.measures.iter().find(|(name, _)| *name == measure).map(|(_, value)| *value)
    }
}

fn is_empty(parts: &Patterns<f64>) -> bool {
    parts.iter().next().is_none()
}

fn is_zero(count: &u64) -> bool {
    *count == 0
}
