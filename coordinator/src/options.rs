//! What a coordinator is started with, and how it ends.

use std::{fmt, path::PathBuf, time::Duration};

use coxswain_proto::{
    ids::{Rank, Step},
    limits,
    run_spec::RunSpec,
};

/// What a coordinator is started with.
#[derive(Clone)]
pub struct Options {
    /// The checked run.
    pub spec: RunSpec,
    /// How many workers, and where.
    pub world: World,
    /// The run's name among runs (`--rdzv-id`); when absent, the journal's, or a fresh one.
    pub run_id: Option<String>,
    /// Where the journal lies; nothing is remembered over a restart without one.
    pub state_dir: Option<PathBuf>,
    /// What callers must present as `authorization: Bearer TOKEN`; required off loopback.
    pub token: Option<String>,
    /// Bounds on waiting.
    pub patience: Patience,
}

impl Options {
    /// A run without a journal or a token, in a world of `world`.
    pub fn new(spec: RunSpec, world: World) -> Self {
        Self { spec, world, run_id: None, state_dir: None, token: None, patience: Patience::default() }
    }
}

impl fmt::Debug for Options {
    /// Without the token.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Options")
            .field("spec", &self.spec)
            .field("world", &self.world)
            .field("run_id", &self.run_id)
            .field("state_dir", &self.state_dir)
            .field("patience", &self.patience)
            .finish_non_exhaustive()
    }
}

/// A fixed world: every node runs the same number of workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct World {
    /// Launchers, one per machine.
    pub nnodes: u32,
    /// Workers of each.
    pub nproc_per_node: u32,
}

impl World {
    /// Workers in all.
    pub fn size(&self) -> u32 {
        self.nnodes.saturating_mul(self.nproc_per_node)
    }
}

/// Bounds on waiting; the defaults are the limits of `coxswain_proto`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Patience {
    /// For the world to be complete.
    pub rendezvous: Duration,
    /// For a sign of life from a worker whose stream is closed.
    pub silence: Duration,
    /// For a sign of life from a worker whose stream is open.
    pub hang: Duration,
    /// For workers to leave after the run is over.
    pub farewell: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Self {
            rendezvous: limits::RENDEZVOUS_TIMEOUT,
            silence: limits::LEASE_TIMEOUT,
            hang: limits::HANG_TIMEOUT,
            farewell: limits::FAREWELL_TIMEOUT,
        }
    }
}

/// How a run ended, as the coordinator saw it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// All steps were committed and every worker left in order.
    Finished {
        /// Committed steps.
        steps: Step,
    },
    /// Someone asked it to stop; every worker left in order.
    Stopped {
        /// Committed steps.
        steps: Step,
        /// As given with the request.
        reason: String,
    },
    /// A worker failed or was lost.
    Failed(FirstCause),
    /// `shutdown` completed before the run was over.
    ShutDown {
        /// Committed steps.
        steps: Step,
    },
}

/// The first cause of a failed run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FirstCause {
    /// The rank it happened on, if it happened on one.
    pub rank: Option<Rank>,
    /// What kind; decides the exit code.
    pub kind: CauseKind,
    /// One line for people.
    pub message: String,
}

impl fmt::Display for FirstCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.rank {
            Some(rank) => write!(f, "rank {rank}: {}", self.message),
            None => f.write_str(&self.message),
        }
    }
}

/// Kinds of first causes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CauseKind {
    /// Out of memory with nothing left to halve.
    OutOfMemory,
    /// A peer's connection broke, and no one said why.
    PeerLost,
    /// Model, data or configuration cannot be used.
    BadInput,
    /// NaN or infinity.
    Numeric,
    /// A file or a socket.
    Io,
    /// A defect of ours.
    Internal,
    /// A worker fell silent, or its process ended without a word.
    WorkerLost,
    /// Ranks disagree about a step.
    Disagreement,
    /// The world was not complete in time.
    Rendezvous,
}
