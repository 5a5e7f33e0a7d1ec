//! What workers report: plain values, without a wire format.

use std::{fmt, ops::Range, time::Duration};

pub use coxswain_proto::cache_plan::CacheUse;
use coxswain_proto::ids::{Bytes, Generation, Seat, Step};
use serde::{Deserialize, Serialize};

/// What a worker is doing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum WorkerPhase {
    /// Its launcher starts its process, which has not made itself known yet.
    Starting,
    /// Waiting for the world to be complete.
    #[default]
    Joining,
    /// Reading the checkpoint and the data set's metadata.
    Loading,
    /// Forming the ring.
    Connecting,
    /// Waiting for data.
    Data,
    /// Forward pass.
    Forward,
    /// Backward pass.
    Backward,
    /// In a collective.
    Communication,
    /// Optimizer step.
    Optimizer,
    /// Writing or reading a checkpoint.
    Checkpoint,
    /// Building the vision-language cache.
    CacheBuild,
    /// Held-out evaluation.
    Evaluation,
    /// Waiting for `resume`.
    Paused,
    /// Nothing more to do.
    Done,
}

impl WorkerPhase {
    /// Whether it comes before the first step of a generation.
    pub fn is_before_steps(self) -> bool {
        matches!(self, Self::Starting | Self::Joining | Self::Loading | Self::Connecting)
    }

    /// As people read it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Starting => "start",
            Self::Joining => "joining",
            Self::Loading => "load",
            Self::Connecting => "connect",
            Self::Data => "data",
            Self::Forward => "forward",
            Self::Backward => "backward",
            Self::Communication => "communication",
            Self::Optimizer => "optimizer",
            Self::Checkpoint => "checkpoint",
            Self::CacheBuild => "cache build",
            Self::Evaluation => "evaluation",
            Self::Paused => "paused",
            Self::Done => "done",
        }
    }
}

impl fmt::Display for WorkerPhase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Where the ranks of a generation had their state from; the later, the dearer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum StateSource {
    /// The run begins.
    Fresh,
    /// Living ranks had all of it.
    Carried,
    /// A lost rank's part came from its neighbour's mirror.
    Mirror,
    /// The newest checkpoint.
    Checkpoint,
}

impl fmt::Display for StateSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Fresh => "fresh",
            Self::Carried => "carried over",
            Self::Mirror => "mirror",
            Self::Checkpoint => "checkpoint",
        })
    }
}

/// What one rank did in one step.
#[derive(Clone, Debug, PartialEq)]
pub struct StepReport {
    /// The membership it was done in; another than the present one is stale and ignored.
    pub generation: Generation,
    /// Which step.
    pub step: Step,
    /// Which epoch its samples belong to.
    pub epoch: u64,
    /// Positions of the epoch's order that this rank consumed.
    pub positions: Vec<Range<u64>>,
    /// Equal on all ranks.
    pub totals: Totals,
    /// Learning rate of the expert's group.
    pub learning_rate: f64,
    /// Where the time went.
    pub times: StepTimes,
    /// Tokens of this rank's samples.
    pub tokens: u64,
    /// Peak bytes in use on this rank.
    pub memory_peak: Bytes,
    /// Times the step was voted down and repeated.
    pub retries: u32,
    /// The generation of the feature cache that it took its features from; 0 for none.
    pub cache_generation: u64,
    /// What the cache did for this rank.
    pub cache: CacheUse,
}

/// Sums over all ranks, agreed in the step's collective: every rank must report the same bits.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Totals {
    /// Sum of losses over valid elements.
    pub loss_sum: f64,
    /// Valid elements.
    pub valid_count: f64,
    /// Norm of the global gradient before clipping.
    pub grad_norm: f64,
}

impl Totals {
    /// The first total on which two ranks differ, bit for bit.
    pub fn difference(&self, other: &Self) -> Option<(&'static str, f64, f64)> {
        [
            ("loss_sum", self.loss_sum, other.loss_sum),
            ("valid_count", self.valid_count, other.valid_count),
            ("grad_norm", self.grad_norm, other.grad_norm),
        ]
        .into_iter()
        .find(|(_, left, right)| left.to_bits() != right.to_bits())
    }

    /// The first total that is NaN or infinite.
    pub fn not_finite(&self) -> Option<(&'static str, f64)> {
        [("loss_sum", self.loss_sum), ("valid_count", self.valid_count), ("grad_norm", self.grad_norm)]
            .into_iter()
            .find(|(_, value)| !value.is_finite())
    }

    /// Mean loss of a valid element.
    pub fn loss(&self) -> f64 {
        if self.valid_count > 0.0 { self.loss_sum / self.valid_count } else { 0.0 }
    }
}

/// Time of one step by what it went into.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepTimes {
    /// Everything.
    pub total: Duration,
    /// Waiting for the data pipeline.
    pub data: Duration,
    /// Vision tower.
    pub vision: Duration,
    /// Language model.
    pub language: Duration,
    /// Sensor encoder, expert and loss.
    pub expert: Duration,
    /// Clipping and AdamW.
    pub optimizer: Duration,
    /// Collectives.
    pub communication: Duration,
}

impl StepTimes {
    /// Adds another rank's times.
    pub fn add(&mut self, other: &Self) {
        self.total += other.total;
        self.data += other.data;
        self.vision += other.vision;
        self.language += other.language;
        self.expert += other.expert;
        self.optimizer += other.optimizer;
        self.communication += other.communication;
    }

    /// The mean of `ranks` times that were added up.
    pub fn mean_of(self, ranks: u32) -> Self {
        let n = ranks.max(1);
        Self {
            total: self.total / n,
            data: self.data / n,
            vision: self.vision / n,
            language: self.language / n,
            expert: self.expert / n,
            optimizer: self.optimizer / n,
            communication: self.communication / n,
        }
    }
}

/// Peaks of one phase on one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PhasePeak {
    /// Which phase.
    pub phase: WorkerPhase,
    /// Allocator, in use.
    pub in_use: Bytes,
    /// Allocator, reserved.
    pub reserved: Bytes,
    /// Driver, or resident set.
    pub driver: Bytes,
}

/// A step that every rank has done.
#[derive(Clone, Debug, PartialEq)]
pub struct CommittedStep {
    /// Which step.
    pub step: Step,
    /// Steps of the whole run.
    pub total_steps: u64,
    /// Which epoch its samples belong to.
    pub epoch: u64,
    /// The membership that did it.
    pub generation: Generation,
    /// Ranks in that membership.
    pub world: u32,
    /// Positions of the epoch's order, over all ranks.
    pub positions: Range<u64>,
    /// As all ranks reported it.
    pub totals: Totals,
    /// Learning rate of the expert's group.
    pub learning_rate: f64,
    /// Mean over ranks.
    pub times: StepTimes,
    /// Over all ranks.
    pub tokens: u64,
    /// Largest over ranks.
    pub memory_peak: Bytes,
    /// Whose that was.
    pub memory_peak_seat: Seat,
    /// Times the step was voted down before it was committed.
    pub retries: u32,
    /// The generation of the feature cache that it took its features from; 0 for none.
    pub cache_generation: u64,
    /// What the cache did: samples over all ranks, mean times.
    pub cache: CacheUse,
    /// Ranks whose reports were there when it was committed. Fewer than `world`: the later state of all ranks proves the rest. 0: that
    /// state alone proves it, and its totals are not known.
    pub reports: u32,
    /// Positions among them that nobody consumed: their samples failed on several workers.
    pub left_out: Vec<Range<u64>>,
}

impl CommittedStep {
    /// Samples over all ranks.
    pub fn samples(&self) -> u64 {
        let left_out: u64 = self.left_out.iter().map(|hole| hole.end - hole.start).sum();
        (self.positions.end - self.positions.start).saturating_sub(left_out)
    }

    /// Samples of all ranks in a second.
    pub fn samples_per_second(&self) -> f64 {
        per_second(self.samples() as f64, self.times.total)
    }

    /// Tokens of all ranks in a second.
    pub fn tokens_per_second(&self) -> f64 {
        per_second(self.tokens as f64, self.times.total)
    }
}

fn per_second(count: f64, time: Duration) -> f64 {
    if time.is_zero() { 0.0 } else { count / time.as_secs_f64() }
}
