//! Fault scripts: a run's shape and what happens to it, as YAML (drawn from a seed: `drawn`).

mod faults;

use std::path::Path;

use coxswain_proto::config::{self, ConfigError};
use serde::Deserialize;

pub use faults::{Fault, Kind, Place};
pub(crate) use faults::{factor, for_s};

/// A run and its faults.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Script {
    /// Decides delays, lost answers, and the order of things that happen at once.
    #[serde(default)]
    pub seed: u64,
    /// Fewest nodes; as many as `nodes` if absent.
    #[serde(default)]
    pub min_nodes: Option<u32>,
    /// Nodes.
    pub nodes: u32,
    /// Workers on each.
    pub workers_per_node: u32,
    /// Workers of all nodes that have no rank while there are others enough.
    #[serde(default)]
    pub spares: u32,
    /// Windows of steps after which a slow rank gives its place to a spare; 0: never.
    #[serde(default)]
    pub replace_slow: u64,
    /// Steps to train.
    pub steps: u64,
    /// Samples in an epoch.
    #[serde(default = "samples")]
    pub samples: u64,
    /// Samples in a step.
    #[serde(default = "global_batch")]
    pub global_batch: u64,
    /// Milliseconds of computing in a step.
    #[serde(default = "step_ms")]
    pub step_ms: f64,
    /// Milliseconds from a process's start until its model is loaded.
    #[serde(default = "load_ms")]
    pub load_ms: f64,
    /// Milliseconds to move the state of a lost rank.
    #[serde(default = "move_ms")]
    pub move_ms: f64,
    /// Steps between checkpoints; 0 for none but the last.
    #[serde(default)]
    pub checkpoint_every: u64,
    /// Milliseconds to write a checkpoint.
    #[serde(default = "save_ms")]
    pub save_ms: f64,
    /// Milliseconds of evaluation after the last step.
    #[serde(default = "eval_ms")]
    pub eval_ms: f64,
    /// Faults that may be survived.
    #[serde(default = "max_restarts")]
    pub max_restarts: u32,
    /// Whether ranks keep replicas of each other's state.
    #[serde(default = "yes")]
    #[serde(rename = "mirror")]
    pub replica: bool,
    /// When features come from a cache; they never do if absent.
    #[serde(default)]
    pub cache: Option<CachePhases>,
    /// The network between coordinator, launchers and workers.
    #[serde(default)]
    pub network: Network,
    /// What happens, in any order.
    #[serde(default)]
    pub faults: Vec<Fault>,
    /// Whether a launcher on another machine takes the coordinator over when its machine is gone.
    #[serde(default)]
    pub standby: bool,
    /// Whether everybody's coming and going is told, too.
    #[serde(skip)]
    pub verbose: bool,
}

/// Cache phases of the feature cache, in steps.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CachePhases {
    /// From the beginning of one live phase to the next.
    pub interval: u64,
    /// Live steps at the beginning of each.
    pub live: u64,
}

/// Delays and losses.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Network {
    /// Least milliseconds of a message.
    pub delay_ms: f64,
    /// Milliseconds that may be added.
    pub jitter_ms: f64,
    /// Answers that are lost with their connection: the call is made again, though it was heard.
    pub lost_answers: f64,
}

impl Default for Network {
    fn default() -> Self {
        Self { delay_ms: 0.2, jitter_ms: 0.5, lost_answers: 0.0 }
    }
}

impl Script {
    /// Reads and checks a file.
    pub fn load(path: &Path) -> Result<Self, ScriptError> {
        let name = path.display().to_string();
        let text = std::fs::read_to_string(path)
            .map_err(|source| ScriptError::Unreadable { path: name.clone(), source })?;
        let script: Self = config::from_yaml(&text, &name)?;
        script.check().map_err(|problem| ScriptError::Impossible { path: name, problem })?;
        Ok(script)
    }

    /// Workers at most.
    pub fn slots(&self) -> u32 {
        self.nodes.saturating_mul(self.workers_per_node)
    }

    fn check(&self) -> Result<(), String> {
        const MOST: u32 = 10_000;
        let least = self.min_nodes.unwrap_or(self.nodes);
        let positive = [
            ("nodes", u64::from(self.nodes)),
            ("min_nodes", u64::from(least)),
            ("workers_per_node", u64::from(self.workers_per_node)),
            ("steps", self.steps),
            ("samples", self.samples),
            ("global_batch", self.global_batch),
        ];
        if let Some((field, _)) = positive.iter().find(|(_, value)| *value == 0) {
            return Err(format!("{field}: must be at least 1"));
        }
        if least > self.nodes {
            return Err(format!("min_nodes: {least} are more than nodes, {}", self.nodes));
        }
        if self.spares >= self.slots() {
            return Err(format!("spares: {} of {} workers leave none to train", self.spares, self.slots()));
        }
        if self.slots() > MOST {
            return Err(format!("nodes x workers_per_node: at most {MOST} workers can be simulated"));
        }
        let times = [
            ("step_ms", self.step_ms),
            ("load_ms", self.load_ms),
            ("move_ms", self.move_ms),
            ("save_ms", self.save_ms),
            ("eval_ms", self.eval_ms),
            ("network.delay_ms", self.network.delay_ms),
            ("network.jitter_ms", self.network.jitter_ms),
        ];
        let is_time = |value: f64| (0.0..1e9).contains(&value);
        if let Some((field, value)) = times.iter().find(|(_, value)| !is_time(*value)) {
            return Err(format!("{field}: {value} is not a time in milliseconds"));
        }
        if self
            .cache
            .is_some_and(|cache_phases| cache_phases.live == 0 || cache_phases.interval <= cache_phases.live)
        {
            return Err("cache: interval must be longer than live, and live at least 1".into());
        }
        if !(0.0..1.0).contains(&self.network.lost_answers) {
            return Err("network.lost_answers: a share of all answers, from 0 to below 1".into());
        }
        for (i, fault) in self.faults.iter().enumerate() {
            if !is_time(fault.at_s) || !is_time(fault.for_s) || !(0.001..1e6).contains(&fault.factor) {
                return Err(format!("faults[{i}]: at_s, for_s and factor must be positive and finite"));
            }
            if fault.what == Kind::Flood && fault.factor > f64::from(MOST) {
                return Err(format!("faults[{i}]: factor: a flood has at most {MOST} connections"));
            }
            if fault.rank >= self.slots() || fault.node >= self.nodes {
                return Err(format!(
                    "faults[{i}]: there is no rank {} or no node {}",
                    fault.rank, fault.node
                ));
            }
        }
        Ok(())
    }
}

/// A script that cannot be played.
#[derive(Debug, thiserror::Error)]
pub enum ScriptError {
    /// The file.
    #[error("{path}: {source}")]
    Unreadable {
        /// Which.
        path: String,
        /// What the operating system said.
        source: std::io::Error,
    },
    /// The text.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The run or a fault.
    #[error("{path}: {problem}")]
    Impossible {
        /// Which file.
        path: String,
        /// Field, and what to do.
        problem: String,
    },
}

fn samples() -> u64 {
    1000
}
fn global_batch() -> u64 {
    32
}
fn step_ms() -> f64 {
    200.0
}
fn load_ms() -> f64 {
    1500.0
}
fn move_ms() -> f64 {
    20.0
}
fn save_ms() -> f64 {
    100.0
}
fn eval_ms() -> f64 {
    100.0
}
fn max_restarts() -> u32 {
    coxswain_proto::limits::MAX_RESTARTS
}
fn yes() -> bool {
    true
}
