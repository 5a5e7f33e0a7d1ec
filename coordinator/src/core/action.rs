//! What the driver must do: the core's decisions as values.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
};

use coxswain_proto::{
    cache_plan::CacheDecision,
    ids::{Generation, Rank, Slot, Step, WorkerId},
    order::DamagedRow,
    replicas::Placement,
};
use serde::{Deserialize, Serialize};

use super::{
    cache::{GenerationEntry, HighWaterMark},
    event::{DataSet, StreamId, Ticket, WorkerClaim},
    failure::{End, Failure},
    memory::RankMemory,
    news::News,
    quarantine::Quarantine,
    reason::RunPhase,
    refusal::Refusal,
    report::{CommittedStep, StateSource},
    roster::Respawn,
    slot_health::SlotHealth,
};
pub use super::{
    failure::SpentBudgets,
    leases::{CacheKey, Lease, LeaseCachePhase},
};
use crate::options::World;

/// One decision. The driver carries out all [`Action::Record`]s of a batch before anything else of it.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Make it durable.
    Record(Record),
    /// Answer a call.
    Reply(Ticket, Result<Reply, Refusal>),
    /// Send it down a line.
    Tell(StreamId, Directive),
    /// Send it down a launcher's line.
    TellNode(StreamId, Respawn),
    /// End a line.
    Close(StreamId),
    /// Show it to watchers, and write it to the log.
    Publish(News),
}

/// An answer.
#[derive(Clone, Debug, PartialEq)]
pub enum Reply {
    /// To `JoinNode`.
    Placed {
        /// The node's place.
        node_rank: u32,
        /// First worker's slot.
        first: Slot,
    },
    /// To `GetRun`: it may have the run.
    Welcome,
    /// To `Register`.
    Registered(WorkerId),
    /// To `Heartbeat`: false means that it must register again.
    Known(bool),
    /// To `Steps`: steps below this one are committed.
    Committed(Step),
    /// To `Node`.
    NodeHeard {
        /// Steps below this one are committed.
        committed: Step,
        /// Workers that must register again.
        unknown: Vec<WorkerId>,
    },
    /// To calls that need no answer.
    Done,
    /// To `Pause`, `Resume` and `Stop`.
    Phase(RunPhase),
    /// To `RebuildCache`.
    Rebuild(CacheDecision),
    /// To `Drain`: the node's place.
    Drained(u32),
    /// To `RefreshMemory`, by rank.
    Memory(Arc<Vec<RankMemory>>),
}

impl Orders {
    /// What workers are told of the memory reports that were asked for.
    pub fn memory(&self) -> Directive {
        Directive::MemoryReport { request: self.memory_reports, reset: self.memory_reset }
    }
}

/// What a worker is told.
#[derive(Clone, Debug, PartialEq)]
pub enum Directive {
    /// The membership is complete.
    Assignment(Arc<Assignment>, Rank),
    /// Samples this rank may consume.
    Lease(Lease),
    /// Wait at the next boundary.
    Pause,
    /// Go on.
    Resume,
    /// Write a checkpoint at the next boundary; requests are numbered from 1.
    Checkpoint(u32),
    /// Report memory.
    MemoryReport {
        /// Requests are numbered from 1.
        request: u32,
        /// The newest one after whose report peaks begin anew; 0: none so far.
        reset: u32,
    },
    /// Finish, checkpoint, export, leave.
    Stop(String),
    /// The generation is over: abandon the collective at once.
    Abort {
        /// Which.
        generation: Generation,
        /// Why.
        reason: String,
        /// The run is over, too.
        over: bool,
    },
    /// Leave the generation together, at the next boundary.
    Regroup {
        /// Which.
        generation: Generation,
        /// After a checkpoint, because some of its workers are to go.
        checkpoint: bool,
    },
    /// Leave, in good order, though the run goes on.
    Dismiss(String),
}

/// One membership, as its workers are told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Assignment {
    /// Which.
    pub generation: Generation,
    /// The step of the newest complete checkpoint; 0 without one.
    pub checkpoint: Step,
    /// By rank.
    pub members: Vec<Member>,
    /// Rows of the data set that are left out.
    pub left_out: Vec<DamagedRow>,
    /// The run's last one: it writes a checkpoint, and trains no step.
    pub closing: bool,
    /// Where the replicas of its optimizer shards lie.
    pub replicas: Placement,
    /// Positions by worker: of `members`, the other way round.
    pub ranks: HashMap<WorkerId, Rank>,
}

/// One worker of a membership.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Name in every call.
    pub worker: WorkerId,
    /// Place.
    pub slot: Slot,
    /// Where it accepts its neighbour.
    pub data_address: String,
    /// Machine.
    pub host: String,
}

impl Assignment {
    /// A membership of these, in rank order, who have slots of this world.
    pub fn new(
        generation: Generation,
        checkpoint: Step,
        members: Vec<Member>,
        quarantine: &Quarantine,
        world: World,
    ) -> Self {
        let ranks = members.iter().map(|member| member.worker).zip((0..).map(Rank)).collect();
        let left_out = quarantine.left_out().copied().collect();
        let nodes: Vec<_> = members.iter().map(|member| world.node_of(member.slot)).collect();
        let replicas = Placement::of(&nodes);
        Self { generation, checkpoint, members, left_out, closing: false, replicas, ranks }
    }

    /// A worker's position, if it is a member.
    pub fn rank_of(&self, worker: WorkerId) -> Option<Rank> {
        self.ranks.get(&worker).copied()
    }

    /// Members.
    pub fn world(&self) -> u32 {
        self.members.len() as u32
    }

    /// Names, in rank order.
    pub fn workers(&self) -> Vec<WorkerId> {
        self.members.iter().map(|member| member.worker).collect()
    }
}

/// What outlives the coordinator. What is large is boxed: a world that forms is as many actions as it has
/// workers, nearly all of them small.
#[derive(Clone, Debug, PartialEq)]
pub enum Record {
    /// The data set all ranks agree on.
    DataSet(DataSet),
    /// A launcher has a place.
    Node {
        /// The place.
        place: u32,
        /// The launcher.
        node_id: String,
        /// Machine.
        host: String,
        /// Version.
        version: String,
    },
    /// A launcher is gone for good.
    NodeGone {
        /// Place.
        place: u32,
    },
    /// A worker has a slot.
    Worker(WorkerId, Box<WorkerClaim>),
    /// A worker is gone, or was asked for again.
    Lost {
        /// Slot.
        slot: Slot,
        /// What its launcher was asked to do, if it was.
        respawn: Option<Respawn>,
    },
    /// A worker left in order.
    Left {
        /// Slot.
        slot: Slot,
        /// Exit code to come.
        exit_code: i32,
    },
    /// A membership was formed.
    Generation {
        /// Which.
        generation: Generation,
        /// By rank.
        members: Vec<(Slot, WorkerId)>,
    },
    /// A membership agreed where to start; later steps of earlier generations are void.
    Started {
        /// Which.
        generation: Generation,
        /// Where it starts.
        first_step: Step,
        /// Where its state came from.
        source: StateSource,
    },
    /// A membership starts before steps that were committed; how far the run has ever been.
    RolledBack(HighWaterMark),
    /// A membership ended.
    Broken {
        /// Which.
        generation: Generation,
    },
    /// A step is committed.
    Step(Arc<CommittedStep>),
    /// What people want.
    Orders(Orders),
    /// What is used up.
    Spent(SpentBudgets),
    /// A failure that was survived so far.
    Failure(Arc<Failure>),
    /// Samples that failed, all of them.
    Quarantine(Quarantine),
    /// Slots whose hardware has shown faults, all of them.
    Health(BTreeMap<Slot, SlotHealth>),
    /// From a step on, a generation of the feature cache serves; what was decided for later steps is void.
    CachePhase(CacheDecision),
    /// What is known of a generation of the feature cache.
    CacheGeneration(Box<GenerationEntry>),
    /// The run is over.
    Over(End),
}

/// What people want; told to every worker whose line is opened.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Orders {
    /// Wait at the next boundary.
    pub pause: bool,
    /// Finish, and why.
    pub stop: Option<String>,
    /// Checkpoints asked for so far.
    pub checkpoints: u32,
    /// The last of them is to be of this step or a later one, and is not written yet. Forgotten when a
    /// generation starts: the worker that was asked may be gone.
    #[serde(default)]
    pub checkpoint_due: Option<Step>,
    /// Memory reports asked for so far.
    pub memory_reports: u32,
    /// The number of the last of them after which peaks were to begin anew.
    #[serde(default)]
    pub memory_reset: u32,
    /// Nodes that are to go, by place.
    #[serde(default)]
    pub draining: BTreeSet<u32>,
}
