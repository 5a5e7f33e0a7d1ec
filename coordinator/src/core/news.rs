//! What watchers and the log are told: decisions as people hear of them.

use std::{sync::Arc, time::Duration};

use coxswain_proto::{
    cache_plan::CacheDecision,
    human,
    ids::{Generation, Slot, Step},
};

use super::{
    cache::{CacheChange, DriftEntry, GenerationEntry},
    checkpoints::CheckpointEntry,
    failure::{Failure, SpentBudgets},
    memory::RankMemory,
    quarantine::{BadSample, SampleVerdict},
    reason::{Reason, RunPhase},
    refusal::Refusal,
    report::{CommittedStep, StateSource},
    slot_health::SlotHealth,
    stragglers::Slowness,
};

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
    Failure(Arc<Failure>, SpentBudgets),
    /// A worker that is in no generation was lost: it is asked to come back, and no other worker is
    /// disturbed.
    LostOutside(Arc<Failure>, SpentBudgets),
    /// A sample failed on a worker that is well, and what follows.
    Sample(BadSample, SampleVerdict, Arc<Failure>),
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
    Note(Slot, String),
    /// A worker stands still and may be given up, or moves again: as a clause.
    Standstill(Slot, String),
    /// A slot is not used any more, for its hardware has shown too many faults.
    Cordoned(Slot, SlotHealth),
    /// A rank's steps take longer than the others', or do not any more.
    Slow(Slot, Option<Slowness>),
    /// A slow rank gives its place to a spare.
    SetAside(Slot, Slowness),
    /// Peaks of every rank: at the end, and when asked for.
    Memory(Arc<Vec<RankMemory>>),
    /// A claim was turned down.
    Refused(Refusal),
}

/// What happened to the feature cache.
#[derive(Clone, Debug, PartialEq)]
pub enum CacheNews {
    /// It was decided which generation serves from a step on.
    Decided(CacheDecision),
    /// A live phase begins at this step, and the generation that served before rests.
    Live(Step, Option<u64>),
    /// A report changed what is known of a generation.
    Reported(GenerationEntry, CacheChange),
    /// How far features have moved, where nothing depends on it.
    Drift(DriftEntry),
}

/// How training went on after a fault.
#[derive(Clone, Debug, PartialEq)]
pub struct Recovery {
    /// The new membership.
    pub generation: Generation,
    /// Workers.
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
    pub spent: SpentBudgets,
    /// Budget given.
    pub max_restarts: u32,
}

impl std::fmt::Display for Recovery {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { generation, members, world, first_step, source, took, what, spent, max_restarts } = self;
        write!(
            f,
            "generation {generation}: {members} of {world} workers, from step {first_step} (state: {source}), {:.2} s after {what}; \
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
        /// Machine.
        host: String,
    },
    /// A launcher is gone.
    NodeGone {
        /// The node.
        node_rank: u32,
        /// Machine.
        host: String,
    },
    /// A node is to go.
    NodeDrained {
        /// The node.
        node_rank: u32,
        /// Machine.
        host: String,
        /// Why.
        reason: String,
    },
    /// A worker is there.
    Registered {
        /// Slot.
        slot: Slot,
        /// Machine.
        host: String,
        /// Process.
        pid: u32,
        /// Device.
        device: String,
    },
    /// A worker's line is closed; it may be gone.
    LineClosed {
        /// Slot.
        slot: Slot,
    },
    /// A worker's line is open again.
    LineOpened {
        /// Slot.
        slot: Slot,
    },
    /// A spare has a rank from now on.
    StandsIn {
        /// Slot.
        slot: Slot,
    },
    /// A worker ended in order.
    Left {
        /// Slot.
        slot: Slot,
        /// Exit code.
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
            Self::Registered { slot, host, pid, device } => {
                write!(f, "rank {slot} joined from {host} (process {pid}, {device})")
            }
            Self::LineClosed { slot } => write!(f, "rank {slot} closed its connection; it may be gone"),
            Self::LineOpened { slot } => write!(f, "rank {slot} is connected again"),
            Self::StandsIn { slot } => write!(f, "rank {slot}, a spare, takes part from now on"),
            Self::Left { slot, exit_code: 0, reason } => write!(f, "rank {slot} left: {reason}"),
            Self::Left { slot, reason, .. } => {
                // The failure has a line of its own, in full.
                write!(f, "rank {slot} left after a failure: {}", human::start(reason, 120))
            }
        }
    }
}
