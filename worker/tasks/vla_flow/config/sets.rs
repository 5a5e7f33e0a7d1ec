//! Several data sets at once: `data.sets`.
//!
//! A mixture is a list of sets, each of which a run could train on alone: what is said of one stands instead
//! of what the section `data` says of all. [`VlaSettings::of_set`] are the settings of that run.

use std::{collections::BTreeSet, path::Path};

use coxswain_data::place;
use coxswain_proto::{
    config::Findings,
    limits::{MAX_METRIC_NAME_BYTES, MAX_SETS},
    run_spec::RunSpec,
};

use super::{
    data::{Data, DataSet},
    settings::VlaSettings,
};

/// As much of a data set's name as has room in a metric's.
const MAX_IN_METRIC: usize = MAX_METRIC_NAME_BYTES - "eval/mse_normalized/set/".len();

/// A data set's name in the names of metrics.
pub fn in_metric(name: &str) -> String {
    name.chars().take(MAX_IN_METRIC).collect()
}

impl VlaSettings {
    /// The settings of a run on this set alone.
    pub fn of_set(&self, set: &DataSet) -> Self {
        let mut own = self.clone();
        let has: Vec<bool> = self.data.cameras.iter().map(|camera| set.has(camera)).collect();
        let there = |names: &[String]| -> Vec<String> {
            names.iter().zip(&has).filter(|(_, has)| **has).map(|(name, _)| name.clone()).collect()
        };
        let cameras = there(&self.data.cameras);
        own.data.cameras =
            cameras.iter().map(|camera| set.camera(camera).unwrap_or(camera).clone()).collect();
        own.serve.cameras = there(&self.serve.cameras);
        own.serve.set = None;
        own.data.sets = Vec::new();
        own.data.episodes.clone_from(&set.episodes);
        own.data.exclude_episodes.clone_from(&set.exclude_episodes);
        let DataSet { state, sensor, action, prompt, normalization, .. } = set.clone();
        own.data.state = state.unwrap_or(own.data.state);
        own.data.sensor = sensor.or(own.data.sensor);
        own.data.action = action.unwrap_or(own.data.action);
        own.data.prompt = prompt.unwrap_or(own.data.prompt);
        own.data.normalization = normalization.unwrap_or(own.data.normalization);
        own
    }

    /// A run on this set alone.
    pub fn spec_of_set(&self, spec: &RunSpec, set: &DataSet) -> RunSpec {
        let mut own = spec.clone();
        own.data.path = match place::is_remote(Path::new(&set.path)) {
            true => set.path.clone(),
            false => Path::new(&spec.data.path).join(&set.path).to_string_lossy().into_owned(),
        };
        own.data.holdout_episodes.clone_from(&set.holdout_episodes);
        own.set_settings(&self.of_set(set));
        own
    }
}

pub(super) fn check(data: &Data, spec: &RunSpec, f: &mut Findings) {
    if data.sets.is_empty() {
        return;
    }
    f.require(
        data.sets.len() <= MAX_SETS,
        "data.sets",
        format_args!("lists {} data sets; the maximum is {MAX_SETS}", data.sets.len()),
        "join some of them into one data set",
    );
    f.require(
        spec.data.holdout_episodes.is_empty(),
        "data.holdout_episodes",
        "does not say which of `data.sets` the episodes belong to",
        "give each set its own `holdout_episodes`",
    );
    for (key, listed) in [("episodes", &data.episodes), ("exclude_episodes", &data.exclude_episodes)] {
        f.require(
            listed.is_empty(),
            &format!("data.{key}"),
            "does not say which of `data.sets` the episodes belong to",
            &format!("give each set its own `{key}`"),
        );
    }
    for camera in &data.cameras {
        f.require(
            data.sets.iter().any(|set| set.has(camera)),
            "data.cameras",
            format_args!("names `{camera}`, which no data set has"),
            "map it in the `cameras` of a set, or remove it",
        );
    }
    let (mut names, mut paths) = (BTreeSet::new(), BTreeSet::new());
    for (at, set) in data.sets.iter().enumerate() {
        let key = |key: &str| format!("data.sets.{at}.{key}");
        f.named(&key("path"), &set.path, "name the directory of a data set");
        f.require(
            paths.insert(&set.path),
            &key("path"),
            format_args!("names `{}` a second time", set.path),
            "list each data set once; `weight` sets how often its samples are drawn",
        );
        let legal = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        let name = set.name();
        f.require(
            !name.is_empty() && name.chars().all(legal) && !name.starts_with('.'),
            &key("name"),
            format_args!("`{name}` is not a usable name"),
            "use letters, digits, `-`, `_` and `.`, and no dot in front",
        );
        f.require(
            names.insert(in_metric(name)),
            &key("name"),
            format_args!(
                "`{name}` does not differ from another data set's name in the first {MAX_IN_METRIC} characters"
            ),
            "give it a `name` that differs in these characters",
        );
        for (of, given) in [("weight", set.weight), ("share", set.share)] {
            let given = given.unwrap_or(1.0);
            f.require(
                given.is_finite() && given > 0.0,
                &key(of),
                format_args!("is {given}, so no sample could be drawn"),
                "give a finite number above 0, or remove the set",
            );
        }
        let by_shares = data.sets.iter().any(|set| set.share.is_some());
        f.require(
            !by_shares || (set.share.is_some() && set.weight.is_none()),
            &key("share"),
            "must be given for all sets or for none, and not together with `weight`",
            "give every set a `share` and no `weight`, or remove every `share`",
        );
        check_cameras(data, set, &key("cameras"), f);
    }
}

fn check_cameras(data: &Data, set: &DataSet, key: &str, f: &mut Findings) {
    let Some(map) = &set.cameras else { return };
    for camera in map.keys() {
        f.require(
            data.cameras.contains(camera),
            key,
            format_args!("maps `{camera}`, which is not one of `data.cameras`"),
            "add it to `data.cameras`, or remove it here",
        );
    }
    f.require(
        data.cameras.iter().any(|camera| map.contains_key(camera)),
        key,
        "maps none of `data.cameras`: the policy would see nothing",
        "map at least one, for instance `{observation.images.front: observation.images.top}`",
    );
}
