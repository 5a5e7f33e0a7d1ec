//! A task for tests: a row of a table goes in, a number comes out.

use serde::{Deserialize, Serialize};

use crate::{
    config::{
        ConfigError, Findings, TaskSchema, TaskSettings, Tasks,
        bounds::{Bounds, COUNT, NO_MOST, SIZE},
    },
    identity::{
        Class::{Learned, LearnedInOrder, LearnedSince, Outside},
        Classes,
    },
    run_spec::{Offload, RunSpec},
};

pub(crate) const TASKS: Tasks = Tasks(&[TaskSchema::of::<Toy>(), TaskSchema::of::<OtherTask>()]);

/// The smallest legal run file.
pub(crate) const SMALL: &str = "\
run: {name: a, output_dir: runs/a}
task: {type: toy}
head: {width: 8}
data:
  path: d
  columns: [x]
train:
  steps: 10
  global_batch: 8
  micro_batch: 2
";

pub(crate) fn read(text: &str, overrides: &[&str]) -> Result<RunSpec, ConfigError> {
    let overrides: Vec<String> = overrides.iter().map(|o| (*o).to_owned()).collect();
    RunSpec::from_yaml(text, "run.yaml", &overrides, TASKS)
}

pub(crate) fn small(overrides: &[&str]) -> RunSpec {
    read(SMALL, overrides).unwrap()
}

pub(crate) fn settings(spec: &RunSpec) -> Toy {
    spec.settings().unwrap()
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Toy {
    pub(crate) head: Head,
    pub(crate) data: Data,
    #[serde(default)]
    pub(crate) optimizer: Optimizer,
    #[serde(default)]
    pub(crate) eval: Eval,
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Head {
    pub(crate) width: usize,
    #[serde(default)]
    pub(crate) bias: bool,
    /// The first pattern that matches decides.
    #[serde(default)]
    pub(crate) frozen: serde_json::Map<String, serde_json::Value>,
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Data {
    pub(crate) columns: Vec<String>,
    #[serde(default)]
    pub(crate) weight: Option<String>,
}

#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Optimizer {
    pub(crate) lr: Rates,
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Rates {
    pub(crate) head: f64,
}

impl Default for Rates {
    fn default() -> Self {
        Self { head: 1e-2 }
    }
}

#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Eval {
    pub(crate) shown: usize,
}

impl TaskSettings for Toy {
    const TYPE: &'static str = "toy";
    const IDENTITY: &'static Classes = &[
        ("head.width", Learned),
        ("head.bias", LearnedSince("false")),
        ("head.frozen", LearnedInOrder),
        ("data.columns", Learned),
        ("data.weight", Learned),
        ("optimizer.lr.head", Learned),
        ("eval.shown", Outside("what is printed")),
    ];
    const BOUNDS: &'static Bounds =
        &[("head.width", 1.0, SIZE), ("optimizer.lr.head", 0.0, NO_MOST), ("eval.shown", 0.0, COUNT)];

    fn check(&self, spec: &RunSpec, f: &mut Findings) {
        f.at_least_one("head.width", self.head.width);
        f.learning_rate("head", self.optimizer.lr.head);
        let layers = spec.memory.offload == Offload::Layers;
        f.require(!layers, "memory.offload", "is `layers`, but nothing is frozen", "remove it");
        let table = spec.memory.offload == Offload::Embedding;
        f.require(!table, "memory.offload", "is `embedding`, but there is no table of tokens", "remove it");
    }
}

/// Another task.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct OtherTask {
    tail: Tail,
}

#[derive(Debug, Serialize, Deserialize)]
struct Tail {
    length: usize,
}

impl TaskSettings for OtherTask {
    const TYPE: &'static str = "other";
    const IDENTITY: &'static Classes = &[("tail.length", Learned)];
    const BOUNDS: &'static Bounds = &[("tail.length", 0.0, SIZE)];

    fn check(&self, _: &RunSpec, _: &mut Findings) {}
}
