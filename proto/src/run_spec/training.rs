//! What it reads and how it trains: what the engine knows of the sections `data`, `train`, `optimizer` and
//! `eval`.

use serde::{Deserialize, Serialize};

/// The data set and how it is read; how samples are cut from it is the task's.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Data {
    /// Where it is.
    pub path: String,
    /// Episodes kept out of training, for `cox eval` and the evaluation at the end.
    #[serde(default)]
    pub holdout_episodes: Vec<usize>,
    /// Micro-batches prepared ahead of the training thread.
    #[serde(default = "default_prefetch")]
    pub prefetch: usize,
    /// Threads of each worker that read and decode samples; as many as it computes with, but at most 8, when
    /// absent.
    #[serde(default)]
    pub threads: Option<usize>,
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
    /// What costs little again for its size: norms, activations, attention, one of the two wide products of
    /// the MLP.
    Selective,
    /// Every block: only the inputs of its two halves are kept.
    Full,
    /// Every n-th block as `full`, the others as `none`.
    Every(usize),
}

/// AdamW (arXiv 1711.05101) and its schedule. Peak rates are the task's: see
/// [`RunSpec::learning_rates`](super::RunSpec::learning_rates).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Optimizer {
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
    /// What gradients travel in between ranks.
    pub reduce_dtype: ReduceDtype,
}

impl Default for Optimizer {
    fn default() -> Self {
        Self {
            betas: [0.9, 0.95],
            eps: 1e-8,
            weight_decay: 1e-8,
            clip_norm: 1.0,
            warmup_steps: 0,
            schedule: Schedule::Cosine,
            min_lr_ratio: 0.1,
            reduce_dtype: ReduceDtype::Float32,
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
    /// The peak, unchanged.
    Constant,
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

/// Held-out evaluation before the first step and after the last.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Eval {
    /// Frames of the held-out episodes to sample actions for, spread evenly; 0 switches evaluation off.
    pub samples: usize,
}

impl Default for Eval {
    fn default() -> Self {
        Self { samples: 64 }
    }
}
