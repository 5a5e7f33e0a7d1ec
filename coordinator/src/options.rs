//! What a coordinator is started with, and how it ends.

use std::{fmt, path::PathBuf, time::Duration};

use coxswain_identity::Door;
use coxswain_proto::{
    ids::{Slot, Step},
    limits,
    run_spec::RunSpec,
};
use serde::{Deserialize, Serialize};

/// What a coordinator is started with.
#[derive(Clone, Debug)]
pub struct Options {
    /// The checked run.
    pub spec: RunSpec,
    /// How many workers, and where.
    pub world: World,
    /// The run's name among runs (`--rdzv-id`); when absent, the journal's, or a fresh one.
    pub run_id: Option<String>,
    /// Where the journal lies; nothing is remembered over a restart without one.
    pub state_dir: Option<PathBuf>,
    /// What callers come through: tokens, TLS.
    pub door: Door,
    /// Bounds on connections.
    pub connections: ConnectionBounds,
    /// Bounds on waiting.
    pub patience: Patience,
    /// Bounds on trying again.
    pub budgets: Budgets,
    /// True when this coordinator takes the place of one that was lost a moment ago: the run goes on from the
    /// journal even where `train.resume` is false.
    pub restarted: bool,
    /// The id of the launcher whose child this coordinator is, if it is one's.
    pub hosted_by: Option<String>,
    /// The number of this coordinator's claim to the role of its run, where launchers of other machines may
    /// take it ([`Claims`](coxswain_identity::claims::Claims)).
    pub claim: Option<u64>,
    /// The id of the launcher that hosted the coordinator before this one, and is gone with its machine.
    pub in_place_of: Option<String>,
    /// What the program says of how it was built, for `run.json`.
    pub built: &'static str,
}

impl Options {
    /// A run without a journal and without tokens, in a world of `world`.
    pub fn new(spec: RunSpec, world: World) -> Self {
        Self {
            spec,
            world,
            run_id: None,
            state_dir: None,
            door: Door::default(),
            connections: ConnectionBounds::default(),
            patience: Patience::default(),
            budgets: Budgets::default(),
            restarted: false,
            hosted_by: None,
            claim: None,
            built: "",
            in_place_of: None,
        }
    }
}

/// How many nodes there may be; every node runs the same number of workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct World {
    /// Fewest nodes to train with.
    pub min_nodes: u32,
    /// Most nodes; places are given for so many.
    pub max_nodes: u32,
    /// Workers of each.
    pub nproc_per_node: u32,
    /// Workers of all nodes that hold no rank while there are others enough.
    pub spares: u32,
}

impl World {
    /// A world of exactly so many nodes.
    pub fn fixed(nnodes: u32, nproc_per_node: u32) -> Self {
        Self { min_nodes: nnodes, max_nodes: nnodes, nproc_per_node, spares: 0 }
    }

    /// The number of slots: workers at most, spares included.
    pub fn size(&self) -> u32 {
        self.max_nodes.saturating_mul(self.nproc_per_node)
    }

    /// Ranks at most.
    pub fn most(&self) -> u32 {
        self.size().saturating_sub(self.spares)
    }

    /// Fewest workers to train with.
    pub fn least(&self) -> u32 {
        self.min_nodes.saturating_mul(self.nproc_per_node).min(self.most())
    }

    /// True when a generation need not have all slots: it may have fewer ranks, or there are spares.
    pub fn elastic(&self) -> bool {
        self.least() < self.size()
    }

    /// The node that a slot is on.
    pub fn node_of(&self, slot: Slot) -> u32 {
        slot.0 / self.nproc_per_node.max(1)
    }

    /// The slots of a node.
    pub fn slots_of(&self, node_rank: u32) -> impl Iterator<Item = Slot> + use<> {
        let first = node_rank.saturating_mul(self.nproc_per_node);
        (first..first.saturating_add(self.nproc_per_node)).map(Slot)
    }
}

/// Bounds on trying again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budgets {
    /// Faults that may be survived (`--max-restarts`). Workers that are lost together are one fault.
    pub restarts: u32,
    /// Changes of the world on purpose (`--max-rescales`); unlimited when absent.
    pub rescales: Option<u32>,
}

impl Default for Budgets {
    fn default() -> Self {
        Self { restarts: limits::MAX_RESTARTS, rescales: None }
    }
}

/// Bounds on waiting; the defaults are the limits of `coxswain_proto`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Patience {
    /// For the world to be complete.
    pub rendezvous: Duration,
    /// For more nodes than the fewest, when the run begins.
    pub last_call: Duration,
    /// For a worker whose line is closed to open it again.
    pub silence: Duration,
    /// For a sign of life from a worker whose line is open.
    pub hang: Duration,
    /// For a node whose line is closed to open it again.
    pub node: Duration,
    /// For workers and nodes to open their lines again after the coordinator was restarted.
    pub reunion: Duration,
    /// For a lost worker's successor, in an elastic world, before training goes on without it.
    pub respawn: Duration,
    /// For a rank that stands still, beyond the time that its work is expected to take.
    pub standstill: Duration,
    /// For one that was named and may be waiting for a disk.
    pub disk: Duration,
    /// For a measurement of drift that all ranks wait for, while none measures.
    pub drift: Duration,
    /// For workers to leave after the run is over.
    pub farewell: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Self {
            rendezvous: limits::RENDEZVOUS_TIMEOUT,
            last_call: limits::LAST_CALL_TIMEOUT,
            silence: limits::SILENCE_TIMEOUT,
            hang: limits::HANG_TIMEOUT,
            node: limits::NODE_TIMEOUT,
            reunion: limits::REUNION_TIMEOUT,
            respawn: limits::RESPAWN_TIMEOUT,
            standstill: limits::STANDSTILL_TIMEOUT,
            disk: limits::DISK_TIMEOUT,
            drift: limits::DRIFT_TIMEOUT,
            farewell: limits::FAREWELL_TIMEOUT,
        }
    }
}

/// Bounds on connections; the defaults are the limits of `coxswain_proto`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectionBounds {
    /// Open at once.
    pub most: usize,
    /// For a connection's first call that may be made.
    pub first_call: Duration,
    /// For the rest of a request that only reads, and for its answer to be taken.
    pub read: Duration,
}

impl Default for ConnectionBounds {
    fn default() -> Self {
        Self {
            most: limits::MAX_CONNECTIONS,
            first_call: limits::FIRST_CALL_TIMEOUT,
            read: limits::READ_TIMEOUT,
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
    /// The worker it happened on, if it happened on one.
    pub slot: Option<Slot>,
    /// What kind; decides the exit code.
    pub kind: CauseKind,
    /// One line for people.
    pub message: String,
}

impl fmt::Display for FirstCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.slot {
            Some(slot) => write!(f, "rank {slot}: {}", self.message),
            None => f.write_str(&self.message),
        }
    }
}

/// Kinds of first causes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum CauseKind {
    /// Out of memory with nothing left to halve.
    OutOfMemory,
    /// The kernel killed a process because memory ran out; there may be something left to halve.
    KilledForMemory,
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
    /// Generation after generation ended without a committed step, or a rank stood still.
    NoProgress,
    /// The worker's machine: it computes wrong results, or does not pass its check.
    Hardware,
}

impl CauseKind {
    /// True when the same would happen again, so that trying again is pointless.
    pub fn is_final(self) -> bool {
        match self {
            Self::OutOfMemory
            | Self::BadInput
            | Self::Numeric
            | Self::Disagreement
            | Self::Rendezvous
            | Self::NoProgress => true,
            Self::KilledForMemory
            | Self::PeerLost
            | Self::Io
            | Self::Internal
            | Self::WorkerLost
            | Self::Hardware => false,
        }
    }
}
