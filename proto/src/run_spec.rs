//! The run specification: everything a run is, as one checked value.
//!
//! A YAML file (plus dotted overrides) becomes a [`RunSpec`] in two steps (`config`): unknown keys and wrong types are refused,
//! then [`RunSpec::check`] refuses values that contradict each other. Coordinator and workers only ever see a checked spec; it
//! travels to workers as JSON inside `coxswain.v1.RunSpecDocument`.
//!
//! Nothing here touches the file system: whether paths exist and agree with each other is for the worker's own checks.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

pub use self::cache::{Cache, CacheDtype, CacheMode, Span, Tap};

mod cache;

/// One run: model, what trains in it, data, optimizer, schedule, and how it is launched.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunSpec {
    /// Name, output directory and seed.
    pub run: Run,
    /// The pretrained vision-language model.
    pub model: Model,
    /// Low-rank adapters; absent means that the vision-language model stays frozen.
    #[serde(default)]
    pub lora: Option<Lora>,
    /// The flow-matching action expert.
    #[serde(default)]
    pub expert: Expert,
    /// The sensor encoder; used only when `data.sensor` names a feature.
    #[serde(default)]
    pub sensor: Sensor,
    /// The LeRobot data set and how samples are cut from it.
    pub data: Data,
    /// Steps, batch, recompute, checkpoints.
    pub train: Train,
    /// AdamW and its schedule.
    #[serde(default)]
    pub optimizer: Optimizer,
    /// Held-out evaluation before the first step and after the last.
    #[serde(default)]
    pub eval: Eval,
    /// Features of the vision-language model, kept instead of computed again.
    #[serde(default)]
    pub cache: Cache,
    /// Peak-memory accounting.
    #[serde(default)]
    pub memory: Memory,
    /// What is kept in store for a lost worker.
    #[serde(default)]
    pub faults: Faults,
    /// Processes and threads; the command line wins over it.
    #[serde(default)]
    pub launch: Launch,
}

/// Name, output directory and seed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Run {
    /// Used in logs and file names: letters, digits, `-`, `_`, `.`.
    pub name: String,
    /// Everything the run writes goes below it.
    pub output_dir: String,
    /// Keys every random draw of the run.
    #[serde(default)]
    pub seed: u64,
}

/// The pretrained vision-language model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Model {
    /// A Hugging Face directory of a Qwen2.5-VL checkpoint.
    pub path: String,
    /// How frozen weights are kept in memory.
    #[serde(default)]
    pub weights_dtype: WeightsDtype,
}

/// How frozen weights are kept in memory. Trainables always have fp32 master weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WeightsDtype {
    /// 4 bytes a weight.
    #[default]
    Float32,
    /// 2 bytes a weight; products still accumulate in fp32.
    Bfloat16,
}

/// LoRA in PEFT's terms (<https://huggingface.co/docs/peft>, `LoraConfig`).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Lora {
    /// Rank `r`.
    #[serde(default = "default_rank")]
    pub rank: usize,
    /// `lora_alpha`; the update is scaled by `alpha / r`, or `alpha / sqrt(r)` with rsLoRA.
    #[serde(default = "default_alpha")]
    pub alpha: f64,
    /// Scale by `alpha / sqrt(r)` (arXiv 2312.03732).
    #[serde(default)]
    pub rslora: bool,
    /// Which linears get an adapter.
    #[serde(default)]
    pub targets: LoraTargets,
    /// Module-name pattern to rank, as PEFT's `rank_pattern`.
    #[serde(default)]
    pub rank_pattern: BTreeMap<String, usize>,
    /// Module-name pattern to alpha, as PEFT's `alpha_pattern`.
    #[serde(default)]
    pub alpha_pattern: BTreeMap<String, f64>,
    /// A PEFT directory to start from instead of `A ~ U, B = 0`; rank, alpha and targets are then read from it and must agree.
    #[serde(default)]
    pub init_from: Option<String>,
}

fn default_rank() -> usize {
    16
}
fn default_alpha() -> f64 {
    32.0
}

/// PEFT's `target_modules`: a list is matched exactly or as a `.`-suffix, a string is a full-match regular expression.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged, expecting = "expected a list of module names, or one regular expression as text")]
pub enum LoraTargets {
    /// `["q_proj", "v_proj"]`
    Suffixes(Vec<String>),
    /// `".*language_model.*\\.(q_proj|v_proj)"`, or `"all-linear"`.
    Regex(String),
}

impl Default for LoraTargets {
    /// Every linear of the language model's attention and MLP; the vision tower stays frozen.
    fn default() -> Self {
        Self::Regex(
            r"model\.language_model\.layers\.\d+\.(self_attn\.(q|k|v|o)_proj|mlp\.(gate|up|down)_proj)"
                .into(),
        )
    }
}

/// The flow-matching action expert: DiT blocks that cross-attend the vision-language hidden states.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Expert {
    /// Model width.
    pub width: usize,
    /// DiT blocks; even ones cross-attend, odd ones self-attend.
    pub layers: usize,
    /// Attention heads; divides `width`.
    pub heads: usize,
    /// Which end of the flow is noise.
    pub convention: FlowConvention,
    /// Independent (noise, time) draws per vision-language forward, `R`.
    pub repeated_noise: usize,
    /// Euler steps when sampling actions.
    pub sampling_steps: usize,
}

impl Default for Expert {
    fn default() -> Self {
        Self {
            width: 384,
            layers: 4,
            heads: 6,
            convention: FlowConvention::NoiseAtZero,
            repeated_noise: 1,
            sampling_steps: 10,
        }
    }
}

/// The two sign conventions of flow matching in the field.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FlowConvention {
    /// GR00T and starVLA: `x_t = (1-t) eps + t A`, target `A - eps`, sampling goes from t = 0 to 1.
    #[default]
    NoiseAtZero,
    /// openpi, SmolVLA and LeRobot: `x_t = t eps + (1-t) A`, target `eps - A`, sampling goes from t = 1 to 0.
    NoiseAtOne,
}

/// The sensor encoder: a window of readings becomes tokens for the expert.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Sensor {
    /// Hidden width of the encoder; its tokens have the expert's width.
    pub width: usize,
    /// Tokens the window is pooled to.
    pub tokens: usize,
}

impl Default for Sensor {
    fn default() -> Self {
        Self { width: 64, tokens: 4 }
    }
}

/// The LeRobot data set and how samples are cut from it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Data {
    /// A LeRobot v3.0 or v2.1 directory.
    pub path: String,
    /// Image features, in prompt order.
    pub cameras: Vec<String>,
    /// Proprioceptive state feature.
    #[serde(default = "default_state")]
    pub state: String,
    /// Windowed sensor feature, shape `[window, channels]`; none switches the sensor encoder off.
    #[serde(default)]
    pub sensor: Option<String>,
    /// Action feature.
    #[serde(default = "default_action")]
    pub action: String,
    /// Actions per chunk, `H`.
    #[serde(default = "default_horizon")]
    pub horizon: usize,
    /// Normalisation per kind of feature.
    #[serde(default)]
    pub normalization: Normalization,
    /// Episodes kept out of training, for `cox eval` and the evaluation at the end.
    #[serde(default)]
    pub holdout_episodes: Vec<usize>,
    /// `{task}` is replaced by the sample's task text.
    #[serde(default = "default_prompt")]
    pub prompt: String,
    /// Bounds of an image's pixels after `smart_resize`; the checkpoint's own when absent. An upper bound is always applied.
    #[serde(default)]
    pub min_pixels: Option<usize>,
    /// See `min_pixels`.
    #[serde(default)]
    pub max_pixels: Option<usize>,
    /// Micro-batches prepared ahead of the training thread.
    #[serde(default = "default_prefetch")]
    pub prefetch: usize,
}

fn default_state() -> String {
    "observation.state".into()
}
fn default_action() -> String {
    "action".into()
}
fn default_horizon() -> usize {
    16
}
fn default_prompt() -> String {
    "{task}".into()
}
fn default_prefetch() -> usize {
    2
}

/// Normalisation per kind of feature, from the data set's `stats.json`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Normalization {
    /// Proprioceptive state.
    pub state: NormMode,
    /// Actions.
    pub action: NormMode,
    /// Sensor window.
    pub sensor: NormMode,
}

/// How one feature is normalised (LeRobot `normalize_processor.py`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NormMode {
    /// As stored.
    Identity,
    /// `(x - mean) / (std + eps)`.
    #[default]
    MeanStd,
    /// `2 (x - min) / (max - min) - 1`.
    MinMax,
    /// `2 (x - q01) / (q99 - q01) - 1`.
    Quantiles,
}

/// Steps, batch, recompute, checkpoints.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
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
    /// Finds the largest micro-batch that fits by trial steps when the run begins, instead of using `micro_batch`.
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
    /// Continue from the newest complete checkpoint in `output_dir`, if there is one.
    #[serde(default = "yes")]
    pub resume: bool,
}

fn default_keep() -> usize {
    2
}
fn one() -> u64 {
    1
}
fn yes() -> bool {
    true
}

/// What is recomputed in the backward pass, per transformer block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Recompute {
    /// Nothing: every block keeps its activations.
    #[default]
    None,
    /// What costs little again for its size: norms, activations, attention, one of the two wide products of the MLP.
    Selective,
    /// Every block: only the inputs of its two halves are kept.
    Full,
    /// Every n-th block as `full`, the others as `none`.
    Every(usize),
}

/// AdamW (arXiv 1711.05101) and its schedule.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Optimizer {
    /// Peak learning rate of each group of trainables.
    pub lr: LearningRates,
    /// Exponential decay rates of the moments.
    pub betas: [f64; 2],
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled weight decay; biases, gains and embeddings are exempt.
    pub weight_decay: f64,
    /// Global gradient norm above which gradients are scaled down; 0 switches clipping off.
    pub clip_norm: f64,
    /// Steps of linear warm-up.
    pub warmup_steps: u64,
    /// What follows the warm-up.
    pub schedule: Schedule,
    /// The cosine ends at this fraction of the peak.
    pub min_lr_ratio: f64,
}

impl Default for Optimizer {
    fn default() -> Self {
        Self {
            lr: LearningRates::default(),
            betas: [0.9, 0.95],
            eps: 1e-8,
            weight_decay: 1e-8,
            clip_norm: 1.0,
            warmup_steps: 0,
            schedule: Schedule::Cosine,
            min_lr_ratio: 0.1,
        }
    }
}

/// Peak learning rate of each group of trainables.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LearningRates {
    /// LoRA matrices of the vision-language model.
    pub lora: f64,
    /// The action expert.
    pub expert: f64,
    /// The sensor encoder.
    pub sensor: f64,
}

impl Default for LearningRates {
    fn default() -> Self {
        Self { lora: 1e-5, expert: 1e-4, sensor: 1e-4 }
    }
}

/// What follows the warm-up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Schedule {
    /// Half a cosine from the peak to `min_lr_ratio` of it.
    #[default]
    Cosine,
    /// The peak, unchanged.
    Constant,
}

/// Held-out evaluation before the first step and after the last.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Eval {
    /// Frames of the held-out episodes to sample actions for, spread evenly; 0 switches evaluation off.
    pub samples: usize,
}

impl Default for Eval {
    fn default() -> Self {
        Self { samples: 64 }
    }
}

/// Peak-memory accounting.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Memory {
    /// Bytes a rank may allocate on the CPU device before an allocation counts as out of memory; absent means no bound.
    pub capacity: Option<u64>,
}

/// What is kept in store for a lost worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Faults {
    /// Whether every rank keeps a mirror of its neighbour's optimizer shard, so that losing one worker loses no step. Costs 12
    /// bytes on each rank for each trainable of a shard; without it a lost worker takes the run back to its last checkpoint.
    pub mirror: bool,
}

impl Default for Faults {
    fn default() -> Self {
        Self { mirror: true }
    }
}

/// Processes and threads; the command line wins over it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Launch {
    /// Worker processes on each node.
    pub nproc_per_node: Option<usize>,
    /// Compute threads of each worker; cores divided by workers when absent.
    pub threads_per_worker: Option<usize>,
    /// Where the coordinator listens; a free loopback port when absent.
    pub listen: Option<String>,
}
