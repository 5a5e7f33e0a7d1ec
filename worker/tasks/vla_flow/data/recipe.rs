//! What is done to a sample beyond normalisation.

use coxswain_data::lerobot::stats::FeatureStats;

use super::{augmentation::Augmenter, deltas::DeltaActions};
use crate::vla_flow::config::Data;

/// What is done to a sample beyond normalisation.
pub(super) struct Recipe {
    /// Changes images in training.
    pub(super) augmenter: Option<Augmenter>,
    pub(super) deltas: DeltaActions,
    /// Statistics of actions that are differences, which the data set does not have.
    pub(super) action_stats: Option<FeatureStats>,
}

impl Recipe {
    /// Without statistics, which are found in the opened data set.
    pub(super) fn new(data: &Data, seed: u64) -> Self {
        Self {
            augmenter: Augmenter::from_settings(&data.augmentation, seed),
            deltas: DeltaActions::new(&data.delta_actions),
            action_stats: None,
        }
    }
}
