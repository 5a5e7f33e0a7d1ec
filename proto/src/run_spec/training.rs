//! What it reads and how it trains: what the engine knows of the sections `data`, `train`, `optimizer` and
//! `eval`.

use std::{collections::BTreeMap, fmt};

use serde::{Deserialize, Deserializer, Serialize};

use super::episodes::episode_numbers;

/// The data set and how it is read; how samples are cut from it is the task's.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Data {
    /// Where it is.
    pub path: String,
    /// Episodes kept out of training, for `cox eval` and the evaluation at the end.
    #[serde(default, deserialize_with = "episode_numbers")]
    pub holdout_episodes: Vec<usize>,
    /// Micro-batches prepared ahead of the training thread.
    #[serde(default = "default_prefetch")]
    pub prefetch: usize,
    /// Threads of each worker that read and decode samples; as many as it computes with, but at most 8, when
    /// absent.
    #[serde(default)]
    pub threads: Option<usize>,
    /// What of buckets is kept on the local disk.
    #[serde(default)]
    pub bucket_cache: BucketCache,
}

/// What of buckets and servers is kept on the local disk. Processes of a machine share it, and so do runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct BucketCache {
    /// The directory; `coxswain/buckets` in the user's directory of caches if absent.
    pub dir: Option<String>,
    /// Bytes it may take; what was used longest ago gives way.
    pub budget: u64,
}

impl Default for BucketCache {
    fn default() -> Self {
        Self { dir: None, budget: 64 << 30 }
    }
}

fn default_prefetch() -> usize {
    2
}

/// Steps, batch, recompute, checkpoints.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Train {
    /// Optimizer steps; give this or `epochs`.
    #[serde(default)]
    pub steps: Option<u64>,
    /// Passes over the training samples; give this or `steps`.
    #[serde(default)]
    pub epochs: Option<u64>,
    /// Samples per optimizer step over all ranks. Never changes with world size or micro-batch.
    pub global_batch: usize,
    /// Samples per forward pass on one rank.
    pub micro_batch: usize,
    /// Finds the largest micro-batch that fits by trial steps when the run begins, instead of using
    /// `micro_batch`.
    #[serde(default)]
    pub auto_micro_batch: bool,
    /// What is recomputed in the backward pass.
    #[serde(default)]
    pub recompute: Recompute,
    /// A checkpoint every so many steps; 0 means only the last.
    #[serde(default)]
    pub checkpoint_every: u64,
    /// Checkpoints kept; older ones are removed after a newer one is complete.
    #[serde(default = "default_keep")]
    pub keep_checkpoints: usize,
    /// One coordinator log line every so many steps.
    #[serde(default = "one")]
    pub log_every: u64,
    /// Steps in a row that may be left out because a loss or gradient is not finite; one more ends the run.
    #[serde(default = "default_max_skipped")]
    pub max_skipped: u32,
    /// Share of the samples that may be left out because they cannot be used.
    #[serde(default = "default_max_left_out", skip_serializing_if = "is_default_max_left_out")]
    pub max_left_out: f64,
    /// What follows where the loss of a step is far above those of the steps before.
    #[serde(default, skip_serializing_if = "Spike::is_off")]
    pub spike: Spike,
    /// How far that is: in units of the middle deviation of the last 64 steps from the middle one.
    #[serde(default = "default_spike_factor", skip_serializing_if = "is_default_spike_factor")]
    pub spike_factor: f64,
    /// Steps to leave out, counted from 0: their samples are consumed, and nothing is learned from them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub skip_steps: Vec<u64>,
    /// Continue from the newest complete checkpoint in `output_dir`, if there is one.
    #[serde(default = "yes")]
    pub resume: bool,
    /// Weights to start from instead of drawn ones: nothing but weights, so the optimizer is new and the
    /// first step is step 0.
    #[serde(default)]
    pub init_from: Option<InitFrom>,
    /// BLAKE3 of what `init_from` names, lower-case hex; found at launch where the run file does not say it.
    #[serde(default)]
    pub init_digest: Option<String>,
    /// Names the content of the pretrained model that the task names, lower-case hex; found at launch where
    /// the run file does not say it. None if the task names no model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base_digest: Option<String>,
}

/// Where weights come from: a run directory, a checkpoint, or what the task can read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged, expecting = "expected a path, or a map from group to path")]
pub enum InitFrom {
    /// One place, for every group that has weights there.
    All(String),
    /// A place for each of the groups named.
    Groups(BTreeMap<String, String>),
}

impl InitFrom {
    /// Every place, with the group that is wanted of it; none for all that are there.
    pub fn places(&self) -> Vec<(Option<&str>, &str)> {
        match self {
            Self::All(path) => vec![(None, path)],
            Self::Groups(paths) => {
                paths.iter().map(|(group, path)| (Some(group.as_str()), path.as_str())).collect()
            }
        }
    }
}

fn default_keep() -> usize {
    2
}
fn default_max_skipped() -> u32 {
    10
}
fn default_max_left_out() -> f64 {
    0.05
}
fn is_default_max_left_out(share: &f64) -> bool {
    *share == default_max_left_out()
}
fn default_spike_factor() -> f64 {
    20.0
}
fn is_default_spike_factor(factor: &f64) -> bool {
    *factor == default_spike_factor()
}
fn one() -> u64 {
    1
}
fn yes() -> bool {
    true
}

/// What follows where the loss of a step is far above those of the steps before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Spike {
    /// Nothing: the step is taken.
    #[default]
    Off,
    /// The step is left out, as one whose loss is not finite.
    Skip,
    /// The run ends.
    End,
}

impl Spike {
    fn is_off(&self) -> bool {
        *self == Self::Off
    }
}

/// What is recomputed in the backward pass, per transformer block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Recompute {
    /// Nothing: every block keeps its activations.
    #[default]
    None,
    /// What costs little again for its size: norms, activations, attention, one of the two wide products of
    /// the MLP.
    Selective,
    /// Every block: only the inputs of its two halves are kept.
    Full,
    /// Every n-th block as `full`, the others as `none`.
    Every(usize),
    /// The least of these that the plan says fits, chosen by each rank for its own memory before the model
    /// loads. Where nothing trains, nothing is chosen, and it is as `none`.
    Auto,
}

impl fmt::Display for Recompute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("none"),
            Self::Selective => f.write_str("selective"),
            Self::Full => f.write_str("full"),
            Self::Every(n) => write!(f, "every {n}"),
            Self::Auto => f.write_str("auto"),
        }
    }
}

/// The update rule and its schedule. Peak rates are the task's: see
/// [`RunSpec::learning_rates`](super::RunSpec::learning_rates).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Optimizer {
    /// The update rule.
    #[serde(skip_serializing_if = "OptimizerName::is_default")]
    pub name: OptimizerName,
    /// Exponential decay rates of the moments.
    pub betas: [f64; 2],
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled weight decay; biases, gains and embeddings are exempt.
    pub weight_decay: PerGroup<f64>,
    /// Gradient norm above which gradients are scaled down, of all groups together or of each that is named;
    /// 0 switches clipping off.
    pub clip_norm: PerGroup<f64>,
    /// Steps of linear warm-up.
    pub warmup_steps: PerGroup<u64>,
    /// Steps of linear warm-up as a fraction of the run's steps, rounded up; instead of `warmup_steps`.
    pub warmup_ratio: Option<f64>,
    /// What follows the warm-up.
    pub schedule: Schedule,
    /// Steps, warm-up included, after which the schedule is at its end; those of the run when absent.
    pub decay_steps: Option<u64>,
    /// Which steps the schedule of a group counts that does not train in all of them.
    #[serde(skip_serializing_if = "ScheduleOver::is_all")]
    pub schedule_over: ScheduleOver,
    /// No schedule goes below this fraction of the peak; the cosine and the line end there.
    pub min_lr_ratio: f64,
    /// What gradients travel in between ranks.
    pub reduce_dtype: ReduceDtype,
    /// Keeps an exponential moving average (EMA) of the weights beside them, of which every step leaves this
    /// share in its place; none when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ema_decay: Option<f64>,
    /// Lets the decay begin at 0 and rise with the steps taken, as `1 - (1 + steps)^-ema_power`, up to
    /// `ema_decay`; there from the first step when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ema_power: Option<f64>,
    /// How the loss is scaled before the backward pass.
    #[serde(skip_serializing_if = "LossScale::is_unsaid")]
    pub loss_scale: LossScale,
}

/// Dynamic loss scaling (arXiv 1710.03740), with the defaults of PyTorch's `torch.amp.GradScaler`: gradients
/// that would be lost beneath float16's smallest number are not, and what overflows is found and left out.
/// The loss is scaled where products are of float16, or where anything is said here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct LossScale {
    /// What the mean loss of a micro-batch is multiplied by in the first step, a power of two; 65536 when
    /// absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub initial: Option<f64>,
    /// Steps in a row that have to be taken before it doubles; 2000 when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub growth_interval: Option<u32>,
}

impl LossScale {
    /// Scales that there may be. Below the least an overflow is none of the scale's.
    pub const RANGE: std::ops::RangeInclusive<f64> = 1.0..=8.507059173023462e37;

    /// Whether nothing is said.
    pub fn is_unsaid(&self) -> bool {
        *self == Self::default()
    }

    /// This section with the defaults of what is not said.
    pub fn filled(self) -> Self {
        Self {
            initial: self.initial.or(Some(65_536.0)),
            growth_interval: self.growth_interval.or(Some(2_000)),
        }
    }
}

/// How weights follow their gradients.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OptimizerName {
    /// AdamW (arXiv 1711.05101): two float32 moments for each element.
    #[default]
    Adamw,
    /// AdamW with both moments in 8 bits, in blocks of 256 (arXiv 2110.02861).
    Adamw8bit,
}

impl OptimizerName {
    /// Why a run with it does not begin on a GPU; none if it works there.
    pub fn refused_on_gpu(self) -> Option<&'static str> {
        (self == Self::Adamw8bit).then_some(
            "optimizer.name: `adamw8bit` works in host memory only, but this run uses a GPU: use `adamw`, \
             with `memory.offload: optimizer` if its state does not fit, or `launch.device: cpu`",
        )
    }

    fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

impl Default for Optimizer {
    fn default() -> Self {
        Self {
            name: OptimizerName::Adamw,
            betas: [0.9, 0.95],
            eps: 1e-8,
            weight_decay: PerGroup::All(1e-8),
            clip_norm: PerGroup::All(1.0),
            warmup_steps: PerGroup::All(0),
            warmup_ratio: None,
            schedule: Schedule::Cosine,
            decay_steps: None,
            schedule_over: ScheduleOver::All,
            min_lr_ratio: 0.1,
            reduce_dtype: ReduceDtype::Float32,
            ema_decay: None,
            ema_power: None,
            loss_scale: LossScale::default(),
        }
    }
}

/// A setting of all groups of trainables, or of those that are named; a group that is not has 0.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum PerGroup<T> {
    /// One value for all.
    All(T),
    /// By the group's name.
    Groups(BTreeMap<String, T>),
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for PerGroup<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged, expecting = "expected a number, or a map from group to number")]
        enum ValueOrGroups<T> {
            All(T),
            Groups(BTreeMap<String, T>),
        }
        // What does not say of itself which of the two it is holds one number.
        if !deserializer.is_human_readable() {
            return T::deserialize(deserializer).map(Self::All);
        }
        ValueOrGroups::deserialize(deserializer).map(|written| match written {
            ValueOrGroups::All(value) => Self::All(value),
            ValueOrGroups::Groups(values) => Self::Groups(values),
        })
    }
}

impl<T: Copy + Default> PerGroup<T> {
    /// The value of a group.
    pub fn of(&self, group: &str) -> T {
        match self {
            Self::All(value) => *value,
            Self::Groups(values) => values.get(group).copied().unwrap_or_default(),
        }
    }

    /// Every value, with the group that it is of; none for all.
    pub fn values(&self) -> Vec<(Option<&str>, T)> {
        match self {
            Self::All(value) => vec![(None, *value)],
            Self::Groups(values) => values.iter().map(|(group, value)| (Some(&**group), *value)).collect(),
        }
    }
}

/// What follows the warm-up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Schedule {
    /// Half a cosine from the peak to `min_lr_ratio` of it.
    #[default]
    Cosine,
    /// A line from the peak to `min_lr_ratio` of it.
    Linear,
    /// The peak, divided by the root of the steps taken over those of the warm-up (10,000 without one).
    InverseSqrt,
    /// The peak, unchanged.
    Constant,
}

/// Which steps a schedule counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ScheduleOver {
    /// All of the run's.
    #[default]
    All,
    /// Steps in which a group trains that rests where kept features serve (`cache.mode: periodic`): its
    /// warm-up counts them, and it ends with those of `decay_steps`, or of the run. Other groups count all.
    Live,
}

impl ScheduleOver {
    fn is_all(&self) -> bool {
        *self == Self::All
    }
}

/// What gradients travel in between ranks. They are added up, clipped and applied in fp32 on either side.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ReduceDtype {
    /// As they are.
    #[default]
    Float32,
    /// Half the bytes; the sum is rounded at every rank on the way. A world of one rounds nothing.
    Bfloat16,
}

/// Held-out evaluation: before the first step, after the last, and every so many steps between.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Eval {
    /// Frames of the held-out episodes to sample actions for, spread evenly; 0 switches evaluation off.
    pub samples: usize,
    /// Steps between evaluations while training goes on; 0 evaluates before the first step and after the last
    /// alone, and keeps no best checkpoint.
    #[serde(skip_serializing_if = "is_zero")]
    pub every: u64,
    /// Samples of one pass; `train.micro_batch` when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub batch: Option<usize>,
    /// Keys the draws of evaluation, the same each time; `run.seed` when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seed: Option<u64>,
}

impl Default for Eval {
    fn default() -> Self {
        Self { samples: 64, every: 0, batch: None, seed: None }
    }
}

fn is_zero(count: &u64) -> bool {
    *count == 0
}
