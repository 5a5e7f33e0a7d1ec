//! The task's keys in run files. Sections may be the engine's (`data`, `optimizer`), keys may not.

use coxswain_proto::{
    config::{
        Findings, TaskSettings,
        bounds::{Bounds, COUNT, NO_MOST, SIZE},
    },
    identity::{Class::Learned, Classes},
    run_spec::{CacheMode, Offload, RunSpec, Shard},
};
use serde::{Deserialize, Serialize};

/// All of them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Settings {
    /// What is trained.
    pub network: Network,
    /// What of the table is read.
    pub data: Data,
    /// Learning rates.
    #[serde(default)]
    pub optimizer: Optimizer,
}

/// What is trained.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Network {
    /// Hidden units.
    pub width: usize,
    /// Standard deviation of what is added to each input in training.
    #[serde(default)]
    pub noise: f64,
}

/// What of the table is read. `data.path`, the engine's key, is its file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Data {
    /// Columns that go in.
    pub inputs: Vec<String>,
    /// The column that is to come out.
    pub target: String,
    /// One of so many rows is held out; 0: none.
    #[serde(default)]
    pub holdout_every: u64,
}

/// The task's part of the section `optimizer`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Optimizer {
    /// Peak learning rate of each group of trainables.
    pub lr: Rates,
}

/// By the group's name.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Rates {
    /// The rate of all weights.
    pub network: f64,
}

impl Default for Rates {
    fn default() -> Self {
        Self { network: 1e-2 }
    }
}

impl Settings {
    /// The settings of a specification that the schema wrote, or checked.
    pub fn of(spec: &RunSpec) -> Self {
        spec.settings().unwrap_or_else(|error| panic!("a run of this task has been checked: {error}"))
    }
}

impl TaskSettings for Settings {
    const TYPE: &'static str = "regression";

    const IDENTITY: &'static Classes = &[
        ("network.width", Learned),
        ("network.noise", Learned),
        ("data.inputs", Learned),
        ("data.target", Learned),
        ("data.holdout_every", Learned),
        ("optimizer.lr.network", Learned),
    ];

    const BOUNDS: &'static Bounds = &[
        ("network.width", 1.0, SIZE),
        ("network.noise", 0.0, NO_MOST),
        ("data.holdout_every", 0.0, COUNT),
        ("optimizer.lr.network", 0.0, NO_MOST),
    ];

    fn check(&self, spec: &RunSpec, f: &mut Findings) {
        f.at_least_one("network.width", self.network.width);
        f.in_range("network.noise", self.network.noise, self.network.noise >= 0.0, "of at least 0");
        f.require(!self.data.inputs.is_empty(), "data.inputs", "names no column", "name at least one");
        f.require(
            !self.data.inputs.contains(&self.data.target),
            "data.target",
            format_args!("`{}` is one of `data.inputs`, too", self.data.target),
            "predict another column",
        );
        f.require(
            self.data.holdout_every != 1,
            "data.holdout_every",
            "holds out every row",
            "give 0 or at least 2",
        );
        f.require(
            spec.data.holdout_episodes.is_empty(),
            "data.holdout_episodes",
            "is given, but a table has no episodes",
            "use `data.holdout_every`",
        );
        f.require(
            spec.cache.mode == CacheMode::Off,
            "cache.mode",
            "is not `off`, but nothing here is frozen",
            "remove it",
        );
        f.require(
            spec.memory.offload != Offload::Layers,
            "memory.offload",
            "is `layers`, but nothing here is frozen",
            "remove it",
        );
        f.require(
            spec.memory.shard != Shard::Frozen,
            "memory.shard",
            "is `frozen`, but nothing here is frozen",
            "remove it",
        );
        f.learning_rate("network", self.optimizer.lr.network);
    }
}

#[cfg(test)]
mod tests {
    use coxswain_proto::config::TaskSchema;

    use super::*;

    #[test]
    fn every_key_says_whether_it_decides_what_is_learned() {
        assert_eq!(TaskSchema::of::<Settings>().misfits(), Vec::<String>::new());
    }
}
