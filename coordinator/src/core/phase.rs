//! The phases of a run and what each of them owns.
//!
//! ```text
//!            every slot is ready             ranks say where they start
//! Gathering ────────────────────▶ Connecting ───────────────────────────▶ Training ──all ranks left──▶ Over
//!     ▲                               │                                      │                          ▲
//!     └───── a worker is lost, peers lost each other, the world changes ─────┘                          │
//!     └───── budget used up, a failure that would come again, stop ─────────────────────────────────────┘
//! ```
//!
//! Connecting and Training are the two stages of [`RunningPhase`]. Only `machine/transitions.rs` moves from
//! one phase to another; `machine/recalling.rs` begins in the one that an earlier life was in. The steps of a
//! generation outlive its phase, for its ranks may still report them: they belong to
//! [`Progress`](super::progress::Progress).

use std::{collections::HashSet, sync::Arc};

use coxswain_proto::ids::{Rank, Step, WorkerId};

pub use super::failure::End;
use super::{action::Assignment, report::StateSource, time::Timestamp};

/// Where a run is.
#[derive(Clone, Debug)]
pub enum Phase {
    /// Workers get ready for the next generation.
    Gathering(Box<GatheringPhase>),
    /// A generation connects or trains.
    Running(Box<RunningPhase>),
    /// Nothing will happen but farewells.
    Over(OverPhase),
}

impl Phase {
    /// The generation that runs.
    pub fn running(&self) -> Option<&RunningPhase> {
        match self {
            Self::Running(running) => Some(running),
            Self::Gathering(_) | Self::Over(_) => None,
        }
    }

    /// Whether nothing will happen but farewells.
    pub fn is_over(&self) -> bool {
        matches!(self, Self::Over(_))
    }
}

/// Workers get ready for the next generation. A moment that is set back to `None` has come.
#[derive(Clone, Debug)]
pub struct GatheringPhase {
    /// When the rendezvous is given up.
    pub deadline: Timestamp,
    /// When members of the old generation must have left it.
    pub settle_by: Option<Timestamp>,
    /// Until when an elastic world waits for successors of lost workers.
    pub respawn_by: Option<Timestamp>,
    /// Until when an elastic world waits for more nodes, when the run begins.
    pub last_call: LastCall,
    /// Why the last generation ended, if it did so without a committed step.
    pub fruitless: Option<String>,
    /// The members of the last generation left it with all state in a checkpoint, so that those that are to
    /// go can.
    pub relieved: bool,
}

impl GatheringPhase {
    /// Gathering for a run that begins.
    pub fn new(deadline: Timestamp) -> Self {
        Self {
            deadline,
            settle_by: None,
            respawn_by: None,
            last_call: LastCall::Closed,
            fruitless: None,
            relieved: false,
        }
    }

    /// No generation was formed before: nothing is trained meanwhile, and every worker is needed.
    pub fn is_first(&self) -> bool {
        self.last_call != LastCall::Over
    }

    /// The next moment at which something is due.
    pub fn next(&self) -> Timestamp {
        let last_call = match self.last_call {
            LastCall::Open(until) => Some(until),
            LastCall::Closed | LastCall::Over => None,
        };
        let others = [self.settle_by, self.respawn_by, last_call].into_iter().flatten();
        others.fold(self.deadline, Timestamp::min)
    }
}

/// How long an elastic world waits for more than its fewest nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LastCall {
    /// The fewest are not there yet.
    Closed,
    /// Until then.
    Open(Timestamp),
    /// No longer.
    Over,
}

/// A generation connects or trains.
#[derive(Clone, Debug)]
pub struct RunningPhase {
    /// What its workers were told.
    pub assignment: Arc<Assignment>,
    /// Workers were asked to leave it at the next boundary.
    pub regroup: bool,
    /// And to write a checkpoint before, since some of them are to go.
    pub hand_over: bool,
    /// Where it is.
    pub stage: Stage,
    /// A rank that was at work when it was last asked for one.
    pub at_work: usize,
    /// Ranks before this one have left, or are lost.
    pub left_up_to: usize,
}

/// Where a generation is.
#[derive(Clone, Debug)]
pub enum Stage {
    /// Ranks find each other, and agree where to start.
    Connecting(ConnectingStage),
    /// Steps are being done.
    Training,
}

/// Ranks find each other, and agree where to start.
#[derive(Clone, Debug, Default)]
pub struct ConnectingStage {
    /// Ranks that have spoken.
    spoken: HashSet<Rank>,
    /// Where the one that spoke first starts, and the dearest source of all: it says most.
    start: Option<(Step, StateSource)>,
    /// Ranks may have spoken to a coordinator that was lost, and will not say it again.
    pub recalled: bool,
}

impl ConnectingStage {
    /// After a restart of the coordinator.
    pub fn recalled() -> Self {
        Self { recalled: true, ..Self::default() }
    }

    /// A rank says where it starts, and where it has its state from; where the first one to speak does.
    pub fn says(&mut self, rank: Rank, first: Step, source: StateSource) -> Step {
        self.spoken.insert(rank);
        let (agreed, dearest) = self.start.get_or_insert((first, source));
        *dearest = (*dearest).max(source);
        *agreed
    }
}

impl RunningPhase {
    /// A generation of these that has just been formed.
    pub fn new(assignment: Arc<Assignment>) -> Self {
        let stage = Stage::Connecting(ConnectingStage::default());
        Self { assignment, regroup: false, hand_over: false, stage, at_work: 0, left_up_to: 0 }
    }

    /// A worker's position, if it is a member.
    pub fn rank_of(&self, worker: WorkerId) -> Option<Rank> {
        self.assignment.rank_of(worker)
    }

    /// Where the ranks that have spoken start, and whether no other need be heard.
    pub fn agreed(&self) -> Option<(Step, StateSource, bool)> {
        let Stage::Connecting(connecting) = &self.stage else { return None };
        let (first, source) = connecting.start?;
        // To a coordinator that was lost the others have spoken, perhaps.
        let last = connecting.spoken.len() == self.assignment.members.len() || connecting.recalled;
        Some((first, source, last))
    }
}

/// The run is over.
#[derive(Clone, Debug)]
pub struct OverPhase {
    /// How it ended.
    pub end: End,
    /// When workers that have not left are waited for no longer.
    pub deadline: Timestamp,
    /// True once the deadline has passed.
    pub expired: bool,
}
