//! The phases of a run and what each of them owns.
//!
//! ```text
//! Gathering ──all ranks there──▶ Running ──all ranks left──▶ Over
//!     │                             │                          ▲
//!     │ stop, failure               │ a victim reports         │ cause found, or time is up
//!     └────────────▶ Over           └──────▶ Searching ────────┘
//! ```
//!
//! Only `machine/transitions.rs` moves from one to another.

use std::sync::Arc;

use coxswain_proto::ids::Step;

use super::{
    action::Assignment,
    failure::{Failure, Search},
    leases::LeaseWindow,
    ledger::StepLedger,
    time::Timestamp,
};

/// Where a run is.
#[derive(Clone, Debug)]
pub enum Phase {
    /// The world is not complete.
    Gathering(Gathering),
    /// A generation trains.
    Running(Box<Running>),
    /// Someone lost a peer; who is to blame is not yet known.
    Searching(Searching),
    /// Nothing will happen but farewells.
    Over(Over),
}

/// The world is not complete.
#[derive(Clone, Debug)]
pub struct Gathering {
    /// When the rendezvous is given up.
    pub deadline: Timestamp,
}

/// A generation trains.
#[derive(Clone, Debug)]
pub struct Running {
    /// What its workers were told.
    pub assignment: Arc<Assignment>,
    /// Its steps.
    pub ledger: StepLedger,
    /// How far its ranks may go.
    pub leases: LeaseWindow,
}

/// The first cause is searched for.
#[derive(Clone, Debug)]
pub struct Searching {
    /// What was told so far.
    pub search: Search,
    /// When the first victim is taken for the cause.
    pub deadline: Timestamp,
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
#[derive(Clone, Debug, PartialEq)]
pub enum End {
    /// Every step was committed and every worker left in order.
    Finished(Step),
    /// Someone asked for it.
    Stopped(Step, String),
    /// The first cause.
    Failed(Arc<Failure>),
}
