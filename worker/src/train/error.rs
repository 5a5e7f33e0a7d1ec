//! Why training on this rank ended early.

use coxswain_proto::ids::{Rank, Step};

use coxswain_feature_store::StoreError;
use coxswain_task::{Fault, TaskError};

use super::{
    guards::{Comparison, SilentTrainables},
    init_from::InitError,
    results::checkpoint::{CheckpointError, remedy},
    unknown_task::UnknownTask,
};
use crate::{
    collective::CollectiveError, feeder::DataError, health::known::WrongResult, link::LinkError,
    memory::OutOfMemory, trainer::FailureKind, zero,
};

/// Why training on this rank ended early.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// The data set, or one of its samples.
    #[error(transparent)]
    Data(#[from] DataError),
    /// The run is of a task that is not there.
    #[error(transparent)]
    UnknownTask(#[from] UnknownTask),
    /// The task's model, or one of its passes.
    #[error(transparent)]
    Task(#[from] TaskError),
    /// The optimizer refused the gradients.
    #[error(transparent)]
    Optimizer(#[from] zero::StepError),
    /// Another pretrained model than the one that the run was launched with.
    #[error(
        "{key} {path}: it has digest {found}, but the run was launched with {launched} (train.base_digest): every node must see the same, \
         unchanged model; set {key} to the model that the run was launched with"
    )]
    OtherModel {
        /// The key that names it.
        key: String,
        /// Where it lies.
        path: String,
        /// Digest of what is there.
        found: String,
        /// `train.base_digest`.
        launched: String,
    },
    /// More elements than kernels of a GPU can index in the buffer that holds all of them.
    #[error(
        "{0} trainable parameters: a GPU can train at most {max}; lower `lora.rank`, or remove modules from \
         `model.train`",
        max = u32::MAX
    )]
    TooManyTrainables(usize),
    /// Weights that the run cannot start from.
    #[error(transparent)]
    Init(#[from] InitError),
    /// A checkpoint that training cannot start from.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The store of features cannot be opened.
    #[error("cache.dir: {0}; name a directory that can be written, or set `cache.mode: off`")]
    Features(#[from] StoreError),
    /// A collective did not finish.
    #[error(transparent)]
    Collective(#[from] CollectiveError),
    /// The control plane ended this rank's part.
    #[error(transparent)]
    Link(#[from] LinkError),
    /// Memory ran out.
    #[error("step {step}: {source}")]
    DoesNotFit {
        /// The step.
        step: Step,
        /// What was wanted.
        source: OutOfMemory,
    },
    /// Memory ran out, and there is no smaller micro-batch to try.
    #[error(
        "step {step} does not fit in memory even with one sample at a time: {source}. To make it fit, use {advice}"
    )]
    Exhausted {
        /// The step.
        step: Step,
        /// What was wanted.
        source: Box<OutOfMemory>,
        /// Settings that take less, most effective first.
        advice: String,
    },
    /// A device did not do what it was told. It says so once, and some time after: which of its orders it was
    /// is in its words, if anywhere.
    #[error(
        "step {step}: the device failed: {detail}. This worker discards the step; if it happens again, \
         run `cox selftest --device cuda`"
    )]
    Device {
        /// The step; 0 while the model is loaded.
        step: Step,
        /// The device's words.
        detail: String,
    },
    /// What this rank has computed from a micro-batch is infinite or not a number.
    #[error("step {step}: the {what} of samples {samples:?} is not finite")]
    NotFinite {
        /// The step.
        step: Step,
        /// `loss` or `gradient`.
        what: &'static str,
        /// Samples of the micro-batch, by index.
        samples: Vec<u64>,
    },
    /// Weights or moments are such that no later step can be taken.
    #[error("the run has diverged: after {steps} steps {found}. {}", remedy_of_divergence(*.good))]
    Diverged {
        /// Steps done.
        steps: Step,
        /// What is wrong with the state.
        found: String,
        /// The checkpoint that a resume goes on from.
        good: Option<Step>,
    },
    /// Step after step was left out.
    #[error(
        "{in_a_row} steps in a row were left out, up to step {step}, because loss or gradients were not \
         finite, or the loss spiked; train.max_skipped allows {allowed}. Either their samples are bad \
         (the log names them), or the run has diverged. {}", remedy_of_divergence(*.good)
    )]
    TooManySkipped {
        /// The last of them.
        step: Step,
        /// How many.
        in_a_row: u32,
        /// How many may be.
        allowed: u32,
        /// The checkpoint that a resume goes on from.
        good: Option<Step>,
    },
    /// Too many samples cannot be used.
    #[error(
        "of the last {seen} samples, {left_out} were left out; train.max_left_out allows {:.1} %: \
         {causes}. Repair the data \
         (`cox data check` lists what is wrong with them) and train on them in another run.output_dir, or raise train.max_left_out",
        100.0 * share
    )]
    TooMuchLeftOut {
        /// Samples of which nothing was learned.
        left_out: u64,
        /// Samples that were looked at.
        seen: u64,
        /// The share that may be left out.
        share: f64,
        /// Why the first could not be used.
        causes: String,
    },
    /// The run is at its end, and no step has learned anything.
    #[error(
        "all samples of all {steps} steps were left out, so nothing was learned and nothing is exported: \
         {causes}. Repair the data (`cox data check` lists what is wrong with them); if the data are \
         good, the pretrained weights are not finite: restore them. Then train in another run.output_dir"
    )]
    NothingLearned {
        /// Steps done.
        steps: Step,
        /// Why the first could not be used.
        causes: String,
    },
    /// Another rank's attempt of this step was lost, so this one's was given up between two layers. Never
    /// leaves the step.
    #[error("given up, because another rank's attempt of this step has failed")]
    CalledOff,
    /// Another rank failed or ran out of memory for good; its own report says why.
    #[error("rank {0} failed in this step; its own log says why")]
    PeerFailed(Rank),
    /// Ranks hold different states, and one of them is wrong.
    #[error("step {step}: {finding}")]
    Differ {
        /// When they compared.
        step: Step,
        /// Which, as far as it can be told.
        finding: Comparison,
    },
    /// What this rank computes from samples is not what others compute from the same ones, twice in a step.
    #[error(
        "step {step}: this rank's gradients are wrong twice in a row: other ranks compute different ones \
         from the same samples. Check its device and its memory"
    )]
    WrongResult {
        /// The step.
        step: Step,
    },
    /// The device does not pass its check.
    #[error("{0}; check the device and its memory")]
    Unsound(#[from] WrongResult),
    /// Nothing trains.
    #[error(transparent)]
    NoGradient(#[from] SilentTrainables),
    /// The run's settings are none of its task's.
    #[error(transparent)]
    Settings(#[from] coxswain_proto::config::ConfigError),
    /// The run cannot be planned.
    #[error(transparent)]
    Plan(#[from] coxswain_proto::plan::PlanError),
    /// A result could not be written.
    #[error("{action} {path}: {source}{}", remedy(source))]
    Io {
        /// What was tried.
        action: &'static str,
        /// On what.
        path: std::path::PathBuf,
        /// The system's words.
        source: std::io::Error,
    },
}

impl TrainError {
    /// Whether a number is at fault, and nothing else: the step may be tried again, or be left out.
    pub fn is_not_finite(&self) -> bool {
        match self {
            Self::Task(error) => error.fault == Fault::Numeric,
            Self::NotFinite { .. } | Self::Optimizer(zero::StepError::NonFinite { .. }) => true,
            _ => false,
        }
    }

    /// The kind under which the coordinator files it.
    pub fn kind(&self) -> FailureKind {
        match self {
            Self::Task(error) => match error.fault {
                Fault::BadInput => FailureKind::BadInput,
                Fault::Numeric => FailureKind::Numeric,
                Fault::Io => FailureKind::Io,
            },
            // A network that is away is no input's fault: the worker is started again.
            Self::Data(error) if error.passes() => FailureKind::Io,
            Self::UnknownTask(_)
            | Self::OtherModel { .. }
            | Self::TooManyTrainables(_)
            | Self::Init(_)
            | Self::Data(_)
            | Self::NoGradient(_)
            | Self::TooMuchLeftOut { .. }
            | Self::NothingLearned { .. }
            | Self::Plan(_)
            | Self::Settings(_)
            | Self::Features(_)
            | Self::Checkpoint(CheckpointError::Foreign { .. }) => FailureKind::BadInput,
            Self::Optimizer(zero::StepError::NonFinite { .. })
            | Self::NotFinite { .. }
            | Self::Diverged { .. }
            | Self::TooManySkipped { .. } => FailureKind::Numeric,
            Self::DoesNotFit { .. } | Self::Exhausted { .. } => FailureKind::OutOfMemory,
            Self::WrongResult { .. } | Self::Unsound(_) => FailureKind::Hardware,
            Self::Collective(CollectiveError::PeerLost { .. })
            | Self::PeerFailed(_)
            | Self::Differ { .. }
            | Self::CalledOff => FailureKind::PeerLost,
            Self::Checkpoint(_) | Self::Io { .. } => FailureKind::Io,
            Self::Collective(CollectiveError::NoTransport(_) | CollectiveError::MixedDevices { .. }) => {
                FailureKind::BadInput
            }
            Self::Optimizer(zero::StepError::Collective(_)) => FailureKind::PeerLost,
            Self::Optimizer(_) | Self::Collective(_) | Self::Link(_) | Self::Device { .. } => {
                FailureKind::Internal
            }
        }
    }
}

/// What to do about a run that has diverged; `good` is the checkpoint that it goes on from.
fn remedy_of_divergence(good: Option<Step>) -> String {
    let from = match good {
        Some(step) => format!(
            "the run resumes from checkpoints/{}, the newest one that is known to be good, because a \
             later step trained from it (later checkpoints are set aside as *.diverged-N)",
            step.checkpoint_dir()
        ),
        None => "the run starts over, because no checkpoint is known to be good".into(),
    };
    format!(
        "Launch again with lower rates (optimizer.lr), a longer warm-up (optimizer.warmup_steps) or a lower optimizer.clip_norm; {from}"
    )
}
