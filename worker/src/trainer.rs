//! What a session runs on its trainer thread, and how that ends.
//!
//! ```text
//! session                          trainer thread
//!   GetRun ───── spec ───────────▶ open(spec)      reads the data set's metadata, nothing heavy
//!   Register ◀── facts ──────────┘
//!   Follow ◀──── Link ───────────▶ train(spec, link)   loads the model while the world gathers, then trains
//!   Leave  ◀──── outcome ────────┘
//! ```

use std::{fmt, ops::Range};

use coxswain_proto::{
    ids::{Bytes, Step},
    order::SetShare,
    run_spec::RunSpec,
};

use crate::link::{Link, Phase};

/// Where a worker's tensors live.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    /// Host memory.
    Cpu,
    /// The GPU of this number among those that the process sees.
    Cuda(usize),
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(gpu) => write!(f, "cuda:{gpu}"),
        }
    }
}

/// The training side of one worker process. All calls happen on the same thread, which is the trainer's
/// alone; a panic in one becomes a [`TrainerFailure`] of kind [`FailureKind::Internal`].
pub trait Trainer: Send + 'static {
    /// Opens what the specification names far enough to know the facts that all ranks must agree on.
    fn open(&mut self, spec: &RunSpec) -> Result<DataSetFacts, TrainerFailure>;

    /// What it computes on; known once it has opened a run.
    fn device(&self) -> Device {
        Device::Cpu
    }

    /// Trains from the first step of the link's assignment to the end. The link outlives the call.
    fn train(&mut self, spec: &RunSpec, link: Box<dyn Link + Send>) -> TrainerOutcome;
}

/// What a worker sees of the data set; equal on all ranks, or the run does not start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DataSetFacts {
    /// Samples in an epoch: frames of the episodes that train.
    pub training_samples: u64,
    /// Names the content as far as it decides the order of samples.
    pub fingerprint: String,
    /// Keys the order of its samples.
    pub order_key: u64,
    /// What an epoch takes of each set of a mixture; empty where it is one data set.
    pub sets: Vec<SetShare>,
}

/// How training ended on this rank.
#[derive(Clone, Debug, PartialEq)]
pub enum TrainerOutcome {
    /// Every step is done, or `stop` was asked for, and what belongs on disk is there.
    Done,
    /// The link said so ([`LinkError`](crate::link::LinkError)): someone else's failure.
    Aborted(String),
    /// This rank failed.
    Failed(TrainerFailure),
}

/// A failure with everything needed to name the first cause in one line.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainerFailure {
    /// What kind; decides the exit code.
    pub kind: FailureKind,
    /// What the rank was doing.
    pub phase: Phase,
    /// The step it was in.
    pub step: Step,
    /// Positions of the epoch's order that it was working on.
    pub positions: Vec<Range<u64>>,
    /// Bytes in use when it happened.
    pub memory_in_use: Bytes,
    /// The error, with its sources.
    pub message: String,
}

impl TrainerFailure {
    /// A failure of which neither samples nor memory are known.
    pub fn new(kind: FailureKind, phase: Phase, step: Step, message: String) -> Self {
        Self { kind, phase, step, positions: Vec::new(), memory_in_use: Bytes(0), message }
    }
}

/// Kinds of failures a rank can see.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FailureKind {
    /// Out of memory with nothing left to halve.
    OutOfMemory,
    /// A peer's connection broke: a victim, not a cause.
    PeerLost,
    /// Model, data or configuration cannot be used.
    BadInput,
    /// NaN or infinity.
    Numeric,
    /// A file or a socket.
    Io,
    /// The machine: it computes wrong results, or does not pass its check.
    Hardware,
    /// A defect of ours.
    Internal,
}
