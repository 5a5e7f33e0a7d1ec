//! What the driver must do: the core's decisions as values.

use std::sync::Arc;

use coxswain_proto::ids::{Generation, LeaseId, Rank, Step, WorkerId};

use super::{
    checkpoints::CheckpointEntry,
    event::{DataSet, StreamId, Ticket},
    failure::Failure,
    memory::RankMemory,
    reason::{Reason, RunPhase},
    refusal::Refusal,
    report::CommittedStep,
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
        /// Rank of its first worker.
        first_rank: Rank,
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
    /// Abandon the collective at once.
    Abort(Generation, String),
}

/// One membership, as its workers are told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Assignment {
    /// Which.
    pub generation: Generation,
    /// The first step that is not committed.
    pub first_step: Step,
    /// By rank.
    pub peers: Vec<Peer>,
}

/// One worker, as its neighbours see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Where it accepts its neighbour.
    pub data_address: String,
    /// Its machine.
    pub host: String,
}

/// The right to consume one slice of every global batch in a range of steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
}

/// What outlives the coordinator.
#[derive(Clone, Debug, PartialEq)]
pub enum Record {
    /// The data set all ranks agree on.
    DataSet(DataSet),
    /// A membership was formed.
    Generation {
        /// Which.
        generation: Generation,
        /// Its ranks.
        world: u32,
        /// Where it starts; later steps of earlier generations are void.
        first_step: Step,
    },
    /// A step is committed.
    Step(Arc<CommittedStep>),
    /// A checkpoint can be resumed from.
    Checkpoint(CheckpointEntry),
    /// The run is over.
    Over {
        /// How.
        phase: RunPhase,
        /// Why.
        reason: String,
    },
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
    /// The first cause of the end.
    Failure(Arc<Failure>),
    /// A failure that followed from another one.
    Consequence(Arc<Failure>),
    /// A worker's line for people.
    Note(Rank, String),
    /// Peaks of every rank: at the end, and when asked for.
    Memory(Arc<Vec<RankMemory>>),
    /// A claim was turned down.
    Refused(Refusal),
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
    /// A worker is there.
    Registered {
        /// Its rank.
        rank: Rank,
        /// Its machine.
        host: String,
        /// Its process.
        pid: u32,
        /// Its device.
        device: String,
    },
    /// A worker's line is closed; it may be gone.
    LineClosed {
        /// Its rank.
        rank: Rank,
    },
    /// A worker's line is open again.
    LineOpened {
        /// Its rank.
        rank: Rank,
    },
    /// A worker ended in order.
    Left {
        /// Its rank.
        rank: Rank,
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
            Self::Registered { rank, host, pid, device } => {
                write!(f, "rank {rank} joined from {host} (process {pid}, {device})")
            }
            Self::LineClosed { rank } => write!(f, "rank {rank} closed its line; it may be gone"),
            Self::LineOpened { rank } => write!(f, "rank {rank} is connected again"),
            Self::Left { rank, exit_code: 0, reason } => write!(f, "rank {rank} left: {reason}"),
            Self::Left { rank, exit_code, reason } => {
                write!(f, "rank {rank} left with exit code {exit_code}: {reason}")
            }
        }
    }
}
