//! `summary.json`: a run in numbers.

use std::{collections::BTreeMap, fs, path::Path};

use coxswain_proto::ids::Step;
use serde::{Deserialize, Deserializer, Serialize};

use super::held_out::HeldOutError;
use crate::train::CacheSummary;
use crate::{
    link::{Phase, StepReport},
    memory::{PhasePeak, prediction::outcome::Outcome},
};

/// The run in numbers.
pub(in crate::train) const SUMMARY_FILE: &str = "summary.json";
/// Scopes of a peak: in use, reserved, driver.
pub(in crate::train) const SCOPES: usize = 3;

/// `summary.json`: a run in numbers.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Summary {
    /// Steps committed over the life of the run.
    pub steps: u64,
    /// The step this process started with: more than 0 after a resume.
    pub first_step: u64,
    /// Whether the run was stopped before its last step.
    pub stopped: bool,
    /// Ranks.
    pub world_size: u32,
    /// Mean loss of this process's first steps (up to 10).
    pub loss_first: f64,
    /// Mean loss of its last steps (up to 10).
    pub loss_last: f64,
    /// Loss of every step of this process; not a number where one was left out, which is null in the file.
    #[serde(deserialize_with = "or_nan")]
    pub losses: Vec<f64>,
    /// Held-out error before the first of these steps.
    pub error_before: Option<HeldOutError>,
    /// Held-out error after the last.
    pub error_after: Option<HeldOutError>,
    /// Held-out error of the weights' average; none if none is kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error_after_ema: Option<HeldOutError>,
    /// Seconds from the first of these steps to the last.
    pub train_seconds: f64,
    /// Seconds of [`train_seconds`](Self::train_seconds) that rank 0's first step on a GPU took beyond those
    /// after it: kernels compiled and matmuls tuned.
    #[serde(default)]
    pub warm_up_seconds: f64,
    /// Samples trained on per second, over all ranks, without the warm-up.
    pub samples_per_second: f64,
    /// Prompt tokens per second, likewise.
    pub tokens_per_second: f64,
    /// Largest snapshots of each rank's memory, in bytes.
    pub peak_memory: Vec<RankPeak>,
    /// Rank 0's memory, predicted and measured.
    #[serde(default)]
    pub memory: Option<Outcome>,
    /// What the feature cache did; none if it was off.
    #[serde(default)]
    pub cache: Option<CacheSummary>,
    #[serde(skip)]
    pub(in crate::train) tokens: u64,
    #[serde(skip)]
    pub(in crate::train) samples: u64,
}

/// Largest snapshots of one rank's memory, in bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankPeak {
    /// Which.
    pub rank: u32,
    /// Allocator, in use.
    pub in_use: u64,
    /// Allocator, reserved.
    pub reserved: u64,
    /// Driver, or resident set.
    pub driver: u64,
    /// Largest snapshots of each phase the rank was in.
    #[serde(default)]
    pub phases: BTreeMap<String, PhasePeak>,
}

impl RankPeak {
    /// From the peaks of [`Phase::ALL`], zero where a phase was never entered.
    pub fn new(rank: u32, peaks: &[f64]) -> Self {
        let mut all = PhasePeak::default();
        let mut phases = BTreeMap::new();
        for (phase, peak) in Phase::ALL.iter().zip(peaks.chunks_exact(SCOPES)) {
            let peak = PhasePeak { in_use: peak[0] as u64, reserved: peak[1] as u64, driver: peak[2] as u64 };
            if peak != PhasePeak::default() {
                all = all.or(peak);
                phases.insert(phase.name().to_owned(), peak);
            }
        }
        Self { rank, in_use: all.in_use, reserved: all.reserved, driver: all.driver, phases }
    }
}

/// Nothing has happened yet.
impl Default for Summary {
    fn default() -> Self {
        Self {
            steps: 0,
            first_step: 0,
            stopped: false,
            world_size: 0,
            loss_first: f64::NAN,
            loss_last: f64::NAN,
            losses: Vec::new(),
            error_before: None,
            error_after: None,
            error_after_ema: None,
            train_seconds: 0.0,
            warm_up_seconds: 0.0,
            samples_per_second: 0.0,
            tokens_per_second: 0.0,
            peak_memory: Vec::new(),
            memory: None,
            cache: None,
            tokens: 0,
            samples: 0,
        }
    }
}

impl Summary {
    /// A generation of `world_size` ranks begins at `step`: where this process begins, or goes on, or goes
    /// back to.
    pub fn begin(&mut self, step: Step, world_size: u32) {
        self.world_size = world_size;
        if self.losses.is_empty() || step.0 < self.first_step {
            self.first_step = step.0;
        }
        self.losses.truncate((step.0 - self.first_step) as usize);
        self.steps = step.0;
    }

    /// One committed step.
    pub fn book(&mut self, done: &StepReport) {
        self.steps = done.step.0 + 1;
        self.losses.push(match done.skipped {
            Some(_) => f64::NAN,
            None => done.totals.loss_sum / done.totals.valid_count.max(1.0),
        });
        self.tokens += done.tokens;
        self.samples += done.positions.iter().map(|range| range.end - range.start).sum::<u64>();
        self.train_seconds += done.times.total.as_secs_f64();
    }

    /// How long a step took, without what only the first ones take; none before there is one.
    pub fn seconds_a_step(&self) -> Option<f64> {
        let seconds = self.train_seconds - self.warm_up_seconds;
        (seconds > 0.0 && !self.losses.is_empty()).then(|| seconds / self.losses.len() as f64)
    }

    /// What an earlier launch left in `dir`; none if that cannot be read.
    pub fn read(dir: &Path) -> Option<Self> {
        serde_json::from_slice(&fs::read(dir.join(SUMMARY_FILE)).ok()?).ok()
    }

    /// The means over the first and the last losses.
    pub fn conclude(&mut self) {
        const SHOWN: usize = 10;
        // Of nothing it is not a number, and null in the file.
        let mean = |losses: &[f64]| {
            let taken = losses.iter().filter(|loss| !loss.is_nan());
            taken.clone().sum::<f64>() / taken.count() as f64
        };
        self.loss_first = mean(&self.losses[..self.losses.len().min(SHOWN)]);
        self.loss_last = mean(&self.losses[self.losses.len().saturating_sub(SHOWN)..]);
    }
}

/// Numbers, and not a number for null.
fn or_nan<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<f64>, D::Error> {
    let values = Vec::<Option<f64>>::deserialize(deserializer)?;
    Ok(values.into_iter().map(|value| value.unwrap_or(f64::NAN)).collect())
}
