//! The phases of a run and what each of them owns.
//!
//! ```text
//!              every seat is ready               ranks say where they start
//! Gathering ──────────────────────▶ Connecting ─────────────────────────────▶ Training ──all ranks left──▶ Over
//!     ▲                                 │                                        │                          ▲
//!     └────── a worker is lost, peers lost each other, the world changes ────────┘                          │
//!     └────── budget used up, a failure that would come again, stop ────────────────────────────────────────┘
//! ```
//!
//! Connecting and Training are the two stages of [`Running`]. Only `machine/transitions.rs` moves from one phase to another;
//! `machine/recalling.rs` begins in the one that an earlier life was in.

use std::{collections::BTreeMap, sync::Arc};

use coxswain_proto::ids::{Rank, Step, WorkerId};
use serde::{Deserialize, Serialize};

use super::{
    action::Assignment, failure::Failure, leases::LeaseWindow, ledger::StepLedger, report::StateSource,
    status::Rhythm, time::Timestamp,
};

/// Where a run is.
#[derive(Clone, Debug)]
pub enum Phase {
    /// Workers get ready for the next generation.
    Gathering(Box<Gathering>),
    /// A generation connects or trains.
    Running(Box<Running>),
    /// Nothing will happen but farewells.
    Over(Over),
}

/// Workers get ready for the next generation. A moment that is set back to `None` has come.
#[derive(Clone, Debug)]
pub struct Gathering {
    /// When the rendezvous is given up.
    pub deadline: Timestamp,
    /// When members of the old generation must have left it.
    pub settle_by: Option<Timestamp>,
    /// Until when an elastic world waits for successors of lost workers.
    pub respawn_by: Option<Timestamp>,
    /// Until when an elastic world waits for more nodes, when the run begins.
    pub last_call: LastCall,
    /// The steps of the newest generation that has started.
    pub earlier: Option<Course>,
    /// Why the last generation ended, if it did so without a committed step.
    pub fruitless: Option<String>,
    /// The members of the last generation left it with all state in a checkpoint, so that those who are to go can.
    pub relieved: bool,
}

impl Gathering {
    /// Of a run that begins.
    pub fn new(deadline: Timestamp) -> Self {
        Self {
            deadline,
            settle_by: None,
            respawn_by: None,
            last_call: LastCall::Closed,
            earlier: None,
            fruitless: None,
            relieved: false,
        }
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

/// The steps of one generation, and how far its ranks may go.
#[derive(Clone, Debug)]
pub struct Course {
    /// Its steps.
    pub ledger: StepLedger,
    /// How far its ranks may go.
    pub leases: LeaseWindow,
}

/// A generation connects or trains.
#[derive(Clone, Debug)]
pub struct Running {
    /// What its workers were told.
    pub assignment: Arc<Assignment>,
    /// Its workers were asked to leave it at the next boundary.
    pub regroup: bool,
    /// And to write a checkpoint before, since some of them are to go.
    pub hand_over: bool,
    /// Where it is.
    pub stage: Stage,
}

/// Where a generation is.
#[derive(Clone, Debug)]
pub enum Stage {
    /// Ranks find each other, and agree where to start.
    Connecting(Connecting),
    /// Steps are being done.
    Training(Training),
}

/// Ranks find each other, and agree where to start.
#[derive(Clone, Debug, Default)]
pub struct Connecting {
    /// The steps of the newest generation that has started.
    pub earlier: Option<Course>,
    /// What ranks have said.
    pub starts: BTreeMap<Rank, (Step, StateSource)>,
    /// Ranks may have spoken to a coordinator that was lost, and will not say it again.
    pub recalled: bool,
}

/// Steps are being done.
#[derive(Clone, Debug)]
pub struct Training {
    /// Its steps.
    pub course: Course,
    /// Where it started.
    pub first_step: Step,
    /// How long its steps take.
    pub rhythm: Rhythm,
}

impl Running {
    /// A worker's position, if it is a member.
    pub fn rank_of(&self, worker: WorkerId) -> Option<Rank> {
        self.assignment.rank_of(worker)
    }

    /// Its steps, once it has started.
    pub fn training(&self) -> Option<&Training> {
        match &self.stage {
            Stage::Training(training) => Some(training),
            Stage::Connecting(_) => None,
        }
    }

    /// True when every step of the run is committed.
    pub fn done(&self) -> bool {
        self.training().is_some_and(|training| training.course.ledger.done())
    }

    /// The steps of the newest generation that has started.
    pub fn into_course(self) -> Option<Course> {
        match self.stage {
            Stage::Connecting(connecting) => connecting.earlier,
            Stage::Training(training) => Some(training.course),
        }
    }
}

impl Phase {
    /// The steps that workers may still report: of the generation that trains, or of the one before until the next has started.
    pub fn course(&self) -> Option<&Course> {
        match self {
            Self::Gathering(gathering) => gathering.earlier.as_ref(),
            Self::Running(running) => match &running.stage {
                Stage::Connecting(connecting) => connecting.earlier.as_ref(),
                Stage::Training(training) => Some(&training.course),
            },
            Self::Over(_) => None,
        }
    }

    /// As [`Phase::course`].
    pub fn course_mut(&mut self) -> Option<&mut Course> {
        match self {
            Self::Gathering(gathering) => gathering.earlier.as_mut(),
            Self::Running(running) => match &mut running.stage {
                Stage::Connecting(connecting) => connecting.earlier.as_mut(),
                Stage::Training(training) => Some(&mut training.course),
            },
            Self::Over(_) => None,
        }
    }

    /// The steps that are being done.
    pub fn training_mut(&mut self) -> Option<&mut Training> {
        match self {
            Self::Running(running) => match &mut running.stage {
                Stage::Training(training) => Some(training),
                Stage::Connecting(_) => None,
            },
            Self::Gathering(_) | Self::Over(_) => None,
        }
    }
}

/// The run is over.
#[derive(Clone, Debug)]
pub struct Over {
    /// How it ended.
    pub end: End,
    /// When workers that have not left are waited for no longer.
    pub deadline: Timestamp,
    /// True once the deadline has passed.
    pub expired: bool,
}

/// How a run ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum End {
    /// Every step was committed and every worker left in order.
    Finished(Step),
    /// Someone asked for it.
    Stopped(Step, String),
    /// The first cause.
    Failed(#[serde(with = "super::failure::shared")] Arc<Failure>),
}
