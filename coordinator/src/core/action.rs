//! What the driver must do: the core's decisions as values.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use coxswain_proto::{
    cache_plan::{CacheGeneration, Decided},
    ids::{Generation, LeaseId, Rank, Seat, Step, WorkerId},
};
use serde::{Deserialize, Serialize};

use super::{
    cache::{Changed, DriftEntry, GenerationEntry},
    checkpoints::CheckpointEntry,
    event::{DataSet, StreamId, Ticket, WorkerClaim},
    failure::Failure,
    memory::RankMemory,
    phase::End,
    quarantine::{EpochPositions, Quarantine, Verdict},
    reason::{Reason, RunPhase},
    refusal::Refusal,
    report::{CommittedStep, StateSource},
    roster::Respawn,
    status::Status,
};

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
        /// Its first worker's seat.
        first: Seat,
    },
    /// To `GetRun`: it may have the run.
    Welcome,
    /// To `Register`.
    Registered(WorkerId),
    /// To `Heartbeat`: false means that it must register again.
    Known(bool),
    /// To `Steps`: steps below this one are committed.
    Committed(Step),
    /// To calls that need no answer.
    Done,
    /// To `Status`.
    Status(Box<Status>),
    /// To `Pause`, `Resume` and `Stop`.
    Phase(RunPhase),
    /// To `RebuildCache`.
    Rebuild(Decided),
    /// To `Drain`: the node's place.
    Drained(u32),
    /// To `ShowMemory`, by rank.
    Memory(Arc<Vec<RankMemory>>),
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
    /// Report memory; requests are numbered from 1.
    MemoryReport(u32),
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
    /// Samples that nobody tries.
    pub left_out: Vec<EpochPositions>,
    /// Positions by worker: of `members`, the other way round.
    pub ranks: BTreeMap<WorkerId, Rank>,
}

/// One worker of a membership.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Its name in every call.
    pub worker: WorkerId,
    /// Its place.
    pub seat: Seat,
    /// Where it accepts its neighbour.
    pub data_address: String,
    /// Its machine.
    pub host: String,
}

impl Assignment {
    /// A membership of these, in rank order.
    pub fn new(
        generation: Generation,
        checkpoint: Step,
        members: Vec<Member>,
        quarantine: &Quarantine,
    ) -> Self {
        let ranks = members.iter().map(|member| member.worker).zip((0..).map(Rank)).collect();
        let left_out = quarantine.left_out().cloned().collect();
        Self { generation, checkpoint, members, left_out, ranks }
    }

    /// A worker's position, if it is a member.
    pub fn rank_of(&self, worker: WorkerId) -> Option<Rank> {
        self.ranks.get(&worker).copied()
    }

    /// Members.
    pub fn world(&self) -> u32 {
        self.members.len() as u32
    }

    /// Their names, in rank order.
    pub fn workers(&self) -> Vec<WorkerId> {
        self.members.iter().map(|member| member.worker).collect()
    }
}

/// The right to consume one slice of every global batch in a range of steps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lease {
    /// Which.
    pub id: LeaseId,
    /// In which membership.
    pub generation: Generation,
    /// From this step.
    pub first: Step,
    /// Up to, not including, this step.
    pub end: Step,
    /// Which slice.
    pub slice: Rank,
    /// Of how many.
    pub slices: u32,
    /// Where all of the steps take their features from.
    pub turn: LeaseTurn,
}

/// Where the steps of a lease take their features from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LeaseTurn {
    /// They are computed; everything trains.
    Live {
        /// The generation that served last.
        kept: Option<CacheKey>,
    },
    /// From this generation.
    Cached(CacheKey),
}

/// A generation of the feature cache, as workers know it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheKey {
    /// Which, and since when.
    pub generation: CacheGeneration,
    /// Its directory in the store, once it is known.
    pub space: Option<String>,
}

/// What outlives the coordinator.
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
        /// Its machine.
        host: String,
    },
    /// A launcher is gone for good.
    NodeGone {
        /// Its place.
        place: u32,
    },
    /// A worker has a seat.
    Worker(WorkerId, WorkerClaim),
    /// A worker is gone, or was asked for again.
    Lost {
        /// Its seat.
        seat: Seat,
        /// What its launcher was asked to do, if it was.
        respawn: Option<Respawn>,
    },
    /// A worker left in order.
    Left {
        /// Its seat.
        seat: Seat,
        /// Its exit code to come.
        exit_code: i32,
    },
    /// A membership was formed.
    Generation {
        /// Which.
        generation: Generation,
        /// By rank.
        members: Vec<(Seat, WorkerId)>,
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
    /// A membership ended.
    Broken {
        /// Which.
        generation: Generation,
    },
    /// A step is committed.
    Step(Arc<CommittedStep>),
    /// A checkpoint can be resumed from.
    Checkpoint(CheckpointEntry),
    /// What people want.
    Orders(Orders),
    /// What is used up.
    Spent(Spent),
    /// A failure that was survived so far.
    Failure(Arc<Failure>),
    /// Samples that failed, all of them.
    Quarantine(Quarantine),
    /// From a step on, a generation of the feature cache serves; what was decided for later steps is void.
    CacheTurn(Decided),
    /// What is known of a generation of the feature cache.
    CacheGeneration(GenerationEntry),
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
    /// Memory reports asked for so far.
    pub memory_reports: u32,
    /// Nodes that are to go, by place.
    #[serde(default)]
    pub draining: BTreeSet<u32>,
}

/// What a run has used of its budgets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spent {
    /// Faults survived.
    pub restarts: u32,
    /// Changes of the world on purpose.
    pub rescales: u32,
    /// Generations in a row that ended without a committed step.
    pub barren: u32,
}

/// What watchers and the log are told.
#[derive(Clone, Debug, PartialEq)]
pub enum News {
    /// A step is committed.
    Step(Arc<CommittedStep>),
    /// The run is in another phase, or in the same one for another reason.
    Phase(RunPhase, Reason),
    /// Someone came or went.
    Member {
        /// The membership, 0 while it is forming.
        generation: Generation,
        /// Workers there now.
        present: u32,
        /// Workers wanted.
        world: u32,
        /// Who.
        change: MemberChange,
    },
    /// A checkpoint got on.
    Checkpoint(CheckpointEntry),
    /// The first cause of a fault; of the end, if it is fatal.
    Failure(Arc<Failure>, Spent),
    /// A sample failed on a worker that is well, and what follows.
    Sample(EpochPositions, Verdict, Arc<Failure>),
    /// Training goes on after a fault.
    Recovered(Recovery),
    /// Committed steps are lost, and will be repeated.
    RolledBack {
        /// Steps below this one were committed.
        from: Step,
        /// Steps below this one still are.
        to: Step,
    },
    /// A failure that followed from another one.
    Consequence(Arc<Failure>),
    /// The feature cache got on.
    Cache(CacheNews),
    /// A worker's line for people.
    Note(Seat, String),
    /// Peaks of every rank: at the end, and when asked for.
    Memory(Arc<Vec<RankMemory>>),
    /// A claim was turned down.
    Refused(Refusal),
}

/// What happened to the feature cache.
#[derive(Clone, Debug, PartialEq)]
pub enum CacheNews {
    /// It was decided which generation serves from a step on.
    Decided(Decided),
    /// A live phase begins at this step, and the generation that served before rests.
    Live(Step, Option<u64>),
    /// A report changed what is known of a generation.
    Reported(GenerationEntry, Changed),
    /// How far features have moved, where nothing depends on it.
    Drift(DriftEntry),
}

/// How training went on after a fault.
#[derive(Clone, Debug, PartialEq)]
pub struct Recovery {
    /// The new membership.
    pub generation: Generation,
    /// Its workers.
    pub members: u32,
    /// Workers wanted.
    pub world: u32,
    /// Where it starts.
    pub first_step: Step,
    /// Where its state came from.
    pub source: StateSource,
    /// Since the first sign of the fault.
    pub took: Duration,
    /// What had happened, as a clause.
    pub what: String,
    /// Budget used.
    pub spent: Spent,
    /// Budget given.
    pub max_restarts: u32,
}

impl std::fmt::Display for Recovery {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { generation, members, world, first_step, source, took, what, spent, max_restarts } = self;
        write!(
            f,
            "generation {generation}: {members} of {world} workers, from step {first_step} ({source}), {:.2} s after {what}; \
             restarts {} of {max_restarts}",
            took.as_secs_f64(),
            spent.restarts
        )
    }
}

/// Who came or went.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MemberChange {
    /// A launcher has its place.
    NodeJoined {
        /// The node.
        node_rank: u32,
        /// Its machine.
        host: String,
    },
    /// A launcher is gone.
    NodeGone {
        /// The node.
        node_rank: u32,
        /// Its machine.
        host: String,
    },
    /// A node is to go.
    NodeDrained {
        /// The node.
        node_rank: u32,
        /// Its machine.
        host: String,
        /// Why.
        reason: String,
    },
    /// A worker is there.
    Registered {
        /// Its seat.
        seat: Seat,
        /// Its machine.
        host: String,
        /// Its process.
        pid: u32,
        /// Its device.
        device: String,
    },
    /// A worker's line is closed; it may be gone.
    LineClosed {
        /// Its seat.
        seat: Seat,
    },
    /// A worker's line is open again.
    LineOpened {
        /// Its seat.
        seat: Seat,
    },
    /// A worker ended in order.
    Left {
        /// Its seat.
        seat: Seat,
        /// Its exit code.
        exit_code: i32,
        /// Why.
        reason: String,
    },
}

impl std::fmt::Display for MemberChange {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::NodeJoined { node_rank, host } => write!(f, "node {node_rank} joined from {host}"),
            Self::NodeGone { node_rank, host } => write!(f, "node {node_rank} on {host} is gone"),
            Self::NodeDrained { node_rank, host, reason } => {
                write!(f, "node {node_rank} on {host} leaves at the next step boundary: {reason}")
            }
            Self::Registered { seat, host, pid, device } => {
                write!(f, "rank {seat} joined from {host} (process {pid}, {device})")
            }
            Self::LineClosed { seat } => write!(f, "rank {seat} closed its line; it may be gone"),
            Self::LineOpened { seat } => write!(f, "rank {seat} is connected again"),
            Self::Left { seat, exit_code: 0, reason } => write!(f, "rank {seat} left: {reason}"),
            Self::Left { seat, exit_code, reason } => {
                write!(f, "rank {seat} left with exit code {exit_code}: {reason}")
            }
        }
    }
}
