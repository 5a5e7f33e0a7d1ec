//! What happens to a run: calls from workers and people, lines that close, time that passes.

use std::{fmt, sync::Arc, time::Duration};

pub use coxswain_proto::report::CheckpointState;
use coxswain_proto::{
    cache_plan::CacheReport,
    ids::{Bytes, Generation, Slot, Step, WorkerId},
    order::{Order, SetShare},
};
use serde::{Deserialize, Serialize};

use super::{
    failure::Failure,
    memory::MemoryReport,
    quarantine::BadSample,
    report::{StateSource, StepReport, WorkerPhase},
};

/// Names one call, so that its answer finds the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub u64);

/// Names one `Follow` or `FollowNode` stream; never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StreamId(pub u64);

/// One thing that happened.
#[derive(Clone, Debug, PartialEq)]
#[expect(clippy::large_enum_variant, reason = "nearly every event is a call")]
pub enum Event {
    /// Someone called, and waits for [`Action::Reply`](super::action::Action::Reply) with this ticket.
    Asked(Ticket, Ask),
    /// A `Follow` stream ended, from either side.
    LineClosed(WorkerId, StreamId),
    /// A `FollowNode` stream ended, from either side.
    NodeLineClosed(String, StreamId),
    /// The moment that `next_deadline` named has come.
    Tick,
}

/// A call.
#[derive(Clone, Debug, PartialEq)]
pub enum Ask {
    /// A launcher wants a place for its node.
    JoinNode(NodeClaim),
    /// A launcher opens its line.
    FollowNode {
        /// Which node.
        node_id: String,
        /// The line.
        stream: StreamId,
    },
    /// A worker wants to know what run this is.
    GetRun(Origin),
    /// A worker claims its slot.
    Register(WorkerClaim),
    /// A worker opens its line.
    Follow {
        /// Who.
        worker: WorkerId,
        /// One process life.
        incarnation: String,
        /// The line.
        stream: StreamId,
    },
    /// A worker can take a place in the next generation.
    Ready(Readiness),
    /// A rank of a new generation says where it starts.
    Start(StartReport),
    /// A worker lives.
    Heartbeat(Beat),
    /// A launcher speaks for workers of its node.
    Node(NodeNews),
    /// A worker finished steps.
    Steps(WorkerId, Vec<StepReport>),
    /// A worker reports its peaks.
    Memory(WorkerId, MemoryReport),
    /// A worker reports a checkpoint.
    Checkpoint(WorkerId, CheckpointReport),
    /// A worker knows something of the feature cache.
    Cache(WorkerId, CacheReport),
    /// Begin a generation of the feature cache with the present adapter.
    RebuildCache,
    /// A worker has a line for people.
    Note {
        /// Who.
        worker: WorkerId,
        /// Counts from 1 in each worker's life.
        sequence: u64,
        /// The line.
        text: String,
        /// It tells of a fault of the worker's machine.
        hardware: bool,
    },
    /// A worker saw a failure.
    Failure {
        /// The run it means.
        run_id: String,
        /// Who; absent before it is registered.
        worker: Option<WorkerId>,
        /// What.
        failure: Failure,
        /// Set if a sample failed and the worker is well: which one.
        sample: Option<BadSample>,
    },
    /// A worker's last word.
    Leave {
        /// Who.
        worker: WorkerId,
        /// The process's exit code to come.
        exit_code: i32,
        /// Why.
        reason: String,
    },
    /// A launcher saw a worker process end.
    Exit {
        /// The launcher's node.
        node_id: String,
        /// Whose process.
        slot: Slot,
        /// Which process; absent when the launcher does not say.
        pid: Option<u32>,
        /// How it ended.
        ended: ProcessExit,
        /// The sample that it was reading when a signal ended it.
        sample: Option<KillingSample>,
    },
    /// Stop at the next boundary and wait.
    Pause,
    /// Go on.
    Resume,
    /// Write a checkpoint at the next boundary.
    CheckpointNow,
    /// Finish the step in flight, write a checkpoint, export, end.
    Stop {
        /// For the log.
        reason: String,
    },
    /// A node is to go, and the rest trains on.
    Drain {
        /// Which.
        node: NodeName,
        /// For the log.
        reason: String,
    },
    /// The memory table, once workers have reported anew.
    RefreshMemory {
        /// And let peaks begin anew behind it.
        reset: bool,
    },
}

/// What a node is called by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NodeName {
    /// Place.
    Place(u32),
    /// Launcher.
    Launcher(String),
}

/// Where a caller comes from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Origin {
    /// Version.
    pub version: String,
    /// The run it means; empty for whichever is here.
    pub run_id: String,
}

/// A launcher's claim to a place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeClaim {
    /// Version and run.
    pub origin: Origin,
    /// Stable over retries of one launcher.
    pub node_id: String,
    /// Machine.
    pub host: String,
    /// Workers it will start.
    pub local_world: u32,
    /// The place it wants.
    pub node_rank: Option<u32>,
    /// It had the place before, and starts no worker by itself.
    pub returns: bool,
}

/// A worker's claim to a slot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerClaim {
    /// Version and run.
    pub origin: Origin,
    /// One process life.
    pub incarnation: String,
    /// The place it claims.
    #[serde(rename = "seat")]
    pub slot: Slot,
    /// Place on its node.
    pub local_rank: u32,
    /// Node.
    pub node_rank: u32,
    /// Machine.
    pub host: String,
    /// Process.
    pub pid: u32,
    /// Where its ring neighbour connects.
    pub data_address: String,
    /// `cpu`, `cuda:0`.
    pub device: String,
    /// The data set it sees.
    pub dataset: DataSet,
}

/// A worker can take a place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Readiness {
    /// Who.
    pub worker: WorkerId,
    /// One process life.
    pub incarnation: String,
    /// The last membership it was in; 0 for none.
    pub left: Generation,
    /// Why it left, if it found out by itself; else empty.
    pub reason: String,
}

/// Where a rank of a new generation starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StartReport {
    /// Who.
    pub worker: WorkerId,
    /// In which membership.
    pub generation: Generation,
    /// The first step that will be run.
    pub first_step: Step,
    /// Where the state came from.
    pub source: StateSource,
}

/// A data set as far as the coordinator knows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataSet {
    /// Samples in an epoch.
    pub training_samples: u64,
    /// Names the content.
    pub fingerprint: String,
    /// Keys the order of its samples.
    pub order_key: u64,
    /// What an epoch takes of each set of a mixture; empty where it is one data set.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sets: Vec<SetShare>,
}

impl DataSet {
    /// The order of its samples under `run.seed`.
    pub fn order(&self, seed: u64) -> Order {
        Order::new(seed, self.order_key, self.training_samples).of_sets(self.sets.clone())
    }
}

impl Ask {
    /// The name of a caller that asks again when it is refused.
    pub fn caller(&self) -> Option<String> {
        match self {
            Self::JoinNode(claim) => Some(claim.node_id.clone()),
            Self::Register(claim) => Some(claim.incarnation.clone()),
            _ => None,
        }
    }
}

impl fmt::Display for DataSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let short: String = self.fingerprint.chars().take(16).collect();
        let of = match self.sets.len() {
            0 => String::new(),
            sets => format!(" per epoch, from {sets} data sets,"),
        };
        write!(f, "{} training samples{of} with fingerprint {short}", self.training_samples)
    }
}

/// What several workers of a node say.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NodeNews {
    /// They live.
    pub beats: Vec<Beat>,
    /// They finished steps.
    pub steps: Vec<(WorkerId, Vec<StepReport>)>,
}

/// A sign of life.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Beat {
    /// Who.
    pub worker: WorkerId,
    /// One process life.
    pub incarnation: Arc<str>,
    /// How long ago the worker said it.
    pub age: Duration,
    /// The membership it is in.
    pub generation: Generation,
    /// What it is doing.
    pub phase: WorkerPhase,
    /// In which step.
    pub step: Step,
    /// Last collective entered, last one finished.
    pub collective: (u64, u64),
    /// Bytes in use.
    pub memory_in_use: Bytes,
    /// How long its trainer has shown no sign of motion beyond what its present work may take.
    pub still: Duration,
    /// How long it has been in this phase.
    pub in_phase: Duration,
    /// Trainer waits for us, for as long as it is still.
    pub waits: bool,
    /// The longest time between two signs of motion in each phase that the worker has been through.
    pub paces: Vec<(WorkerPhase, Duration)>,
}

/// What a worker says of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckpointReport {
    /// At which step.
    pub step: Step,
    /// What happened.
    pub state: CheckpointState,
    /// Relative to the output directory.
    pub path: String,
    /// Bytes of the whole checkpoint.
    pub bytes: Bytes,
}

/// A sample that ended the process that read it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KillingSample {
    /// Which.
    pub sample: BadSample,
    /// When.
    pub generation: Generation,
}

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProcessExit {
    /// By itself.
    Code(i32),
    /// By a signal.
    Signal(i32),
    /// By the kernel, because memory ran out.
    OutOfMemory,
}

impl ProcessExit {
    /// Whether a sample may have ended it, that is, by a signal. A SIGKILL comes from people, schedulers and
    /// the kernel.
    pub fn may_be_of_a_sample(self) -> bool {
        matches!(self, Self::Signal(signal) if signal != 9)
    }
}

impl fmt::Display for ProcessExit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Code(code) => {
                write!(f, "its process ended with exit code {code} without reporting a failure")
            }
            Self::Signal(9) => f.write_str(
                "its process was killed by signal 9: by hand, or by the kernel because memory ran out",
            ),
            Self::OutOfMemory => f.write_str(
                "its process was killed by the kernel because its cgroup or the machine ran out of memory",
            ),
            Self::Signal(signal) => write!(f, "its process was ended by signal {signal}"),
        }
    }
}
