//! What of an observation a policy sees beside one frame of its features: the section `observation`.

use coxswain_proto::config::Findings;
use serde::{Deserialize, Serialize};

use super::data::Data;

/// Most past frames. Each has all cameras, and each image hundreds of tokens.
const MAX_HISTORY: usize = 32;
/// Furthest frame back: an hour at 30 frames a second.
const MAX_FRAMES_BACK: i64 = 108_000;

/// What of an observation a policy sees beside one frame of its features.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Observation {
    /// Past frames that are seen before the present one, as their distances from it in rows of the data set,
    /// the oldest first: `[-10, -5]`.
    pub history: Vec<i64>,
    /// Tokens of the instruction that are kept, with what `data.prompt` has around it; all when absent.
    pub max_text_tokens: Option<usize>,
}

impl Observation {
    /// Frames of a sample: those of the past, and the present one.
    pub fn frames(&self) -> usize {
        self.history.len() + 1
    }

    /// How many rows before the present one its frames stand, the oldest first; the last is 0.
    pub fn rows_back(&self) -> impl Iterator<Item = u64> + '_ {
        self.history.iter().map(|frame| frame.unsigned_abs()).chain([0])
    }

    /// Rows from the oldest frame to the present one.
    pub fn reach(&self) -> u64 {
        self.rows_back().next().unwrap_or(0)
    }

    pub(super) fn check(&self, f: &mut Findings) {
        let past = self.history.iter().all(|frame| (-MAX_FRAMES_BACK..0).contains(frame));
        f.require(
            past && self.history.is_sorted_by(|one, other| one < other),
            "observation.history",
            format_args!("must be ascending offsets from -{MAX_FRAMES_BACK} to -1, is {:?}", self.history),
            "list past frames, the oldest first, for instance [-10, -5]; LeRobot's n_obs_steps: 2 is [-1]",
        );
        f.require(
            self.history.len() <= MAX_HISTORY,
            "observation.history",
            format_args!("has {} frames; the maximum is {MAX_HISTORY}", self.history.len()),
            "remove some: each frame adds an image of every camera",
        );
        f.at_least_one("observation.max_text_tokens", self.max_text_tokens.unwrap_or(1));
    }
}

/// Rules of the columns that a policy takes and gives.
pub(super) fn check_features(data: &Data, f: &mut Findings) {
    f.require(
        !data.action.is_none(),
        "data.action",
        "is `none`, but a policy needs actions",
        "name the action feature, for instance `action`",
    );
    for (key, list, example) in
        [("data.state", &data.state, "observation.state"), ("data.action", &data.action, "action")]
    {
        for (at, name) in list.names().iter().enumerate() {
            f.named(key, name, &format!("name features of the data set, for instance `{example}`"));
            f.require(
                !list.names()[..at].contains(name),
                key,
                format_args!("names `{name}` twice"),
                "name each feature once",
            );
        }
    }
    f.require(
        !data.state.is_none() || !data.delta_actions.contains(&true),
        "data.delta_actions",
        "makes actions relative to the state, but `data.state` is `none`",
        "name a state in `data.state`, or remove `data.delta_actions`",
    );
    if let Some(sensor) = &data.sensor {
        f.named("data.sensor", &sensor.key, "name the sensor feature or remove the key");
        f.at_least_one("data.sensor.window", sensor.window.unwrap_or(1));
    }
}
