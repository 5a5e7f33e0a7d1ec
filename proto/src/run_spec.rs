//! The run specification: everything a run is, as one checked value.
//!
//! A YAML file (plus dotted overrides) becomes a [`RunSpec`] in two steps (`config`): unknown keys and wrong types are refused,
//! then values that contradict each other. Coordinator and workers only ever see a checked spec; it travels to workers as JSON
//! inside `coxswain.v1.RunSpecDocument`.
//!
//! The engine's keys are fields here. A task's keys ([`TaskSchema`](crate::config::TaskSchema)) are carried as JSON that only the task
//! reads, through [`RunSpec::settings`].
//!
//! Nothing here touches the file system: whether paths exist and agree with each other is for the worker's own checks.

mod cache;
mod resources;
mod sections;
mod training;

use serde::{Deserialize, Serialize};

pub(crate) use self::sections::{EnginePart, MARKS};
pub use self::{
    cache::{Cache, CacheDtype, CacheMode, Span, Tap},
    resources::{Collectives, DeviceChoice, Faults, Launch, Memory, Offload},
    sections::SettingsError,
    training::{Data, Eval, Optimizer, Recompute, ReduceDtype, Schedule, Train},
};

/// The task of a run that names none: there was no other when run files did not name one.
pub const DEFAULT_TASK: &str = "vla_flow";

/// One run: its task, data, optimizer, schedule, and how it is launched.
// `remote = "Self"` makes serde's code for the fields inherent functions. The traits, which add the task's keys, are in `sections`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(remote = "Self")]
pub struct RunSpec {
    /// Name, output directory and seed.
    pub run: Run,
    /// What is learned, and what reads the keys that are not the engine's.
    #[serde(default)]
    pub task: Task,
    /// The data set and how it is read.
    pub data: Data,
    /// Steps, batch, recompute, checkpoints.
    pub train: Train,
    /// AdamW and its schedule.
    #[serde(default)]
    pub optimizer: Optimizer,
    /// Held-out evaluation before the first step and after the last.
    #[serde(default)]
    pub eval: Eval,
    /// Features of what does not train, kept instead of computed again.
    #[serde(default)]
    pub cache: Cache,
    /// Peak-memory accounting, and what is kept elsewhere than where a rank computes.
    #[serde(default)]
    pub memory: Memory,
    /// What is kept in store for a lost worker.
    #[serde(default)]
    pub faults: Faults,
    /// Processes and threads; the command line wins over it.
    #[serde(default)]
    pub launch: Launch,
    /// The task's keys.
    #[serde(skip)]
    sections: sections::Sections,
}

/// Name, output directory and seed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Run {
    /// Used in logs and file names: letters, digits, `-`, `_`, `.`.
    pub name: String,
    /// Everything the run writes goes below it.
    pub output_dir: String,
    /// Keys every random draw of the run.
    #[serde(default)]
    pub seed: u64,
}

/// What is learned.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Task {
    /// Name of the task whose schema reads the keys that are not the engine's.
    #[serde(rename = "type")]
    pub kind: String,
}

impl Default for Task {
    fn default() -> Self {
        Self { kind: DEFAULT_TASK.into() }
    }
}
