//! Failures, and which of several is the first cause.
//!
//! One rank's fault breaks its neighbours' connections, so a fault is usually told by several ranks at once and the victims may
//! speak first. A report that names its own cause ends the search; with victims alone the search goes on until the silent one is
//! found or time is up:
//!
//! ```text
//! numeric, input, io, oom, internal, lost, disagreement    a cause: decided at once
//! peer lost                                                a victim: wait for the rank that fell silent
//! ```

use std::{fmt, ops::Range};

use coxswain_proto::ids::{Bytes, Generation, Rank, Step};

use super::report::WorkerPhase;
use crate::options::{CauseKind, FirstCause};

/// One failure, with everything needed to name it in a line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// What kind.
    pub kind: CauseKind,
    /// Whose, if it is one rank's.
    pub rank: Option<Rank>,
    /// On which machine.
    pub host: String,
    /// In which membership.
    pub generation: Generation,
    /// What the rank was doing.
    pub phase: WorkerPhase,
    /// In which step.
    pub step: Step,
    /// Sequence number of the last collective it entered.
    pub collective: u64,
    /// Positions of the epoch's order that it was working on.
    pub positions: Vec<Range<u64>>,
    /// Bytes in use.
    pub memory_in_use: Bytes,
    /// The error itself.
    pub message: String,
}

impl Failure {
    /// A failure of the run as a whole.
    pub fn of_run(kind: CauseKind, message: String) -> Self {
        Self {
            kind,
            rank: None,
            host: String::new(),
            generation: Generation(0),
            phase: WorkerPhase::Joining,
            step: Step(0),
            collective: 0,
            positions: Vec::new(),
            memory_in_use: Bytes(0),
            message,
        }
    }

    /// True when this rank only saw another one go.
    pub fn is_victim(&self) -> bool {
        self.kind == CauseKind::PeerLost
    }

    /// What the run's outcome says of it.
    pub fn first_cause(&self) -> FirstCause {
        FirstCause { rank: self.rank, kind: self.kind, message: self.message.clone() }
    }
}

impl fmt::Display for Failure {
    /// `rank 1 on node-b, forward of step 57, positions 12..14, 3.2 GiB in use: MESSAGE`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(rank) = self.rank else { return f.write_str(&self.message) };
        write!(f, "rank {rank}")?;
        if !self.host.is_empty() {
            write!(f, " on {}", self.host)?;
        }
        match self.phase {
            WorkerPhase::Joining | WorkerPhase::Loading | WorkerPhase::Connecting => {
                write!(f, ", {}", self.phase)?
            }
            phase => write!(f, ", {phase} of step {}", self.step)?,
        }
        for positions in &self.positions {
            write!(f, ", positions {}..{}", positions.start, positions.end)?;
        }
        if self.memory_in_use > Bytes(0) {
            write!(f, ", {} in use", crate::human::bytes(self.memory_in_use))?;
        }
        write!(f, ": {}", self.message)
    }
}

/// Failures of one end of a run, while the first cause is searched for.
#[derive(Clone, Debug, Default)]
pub struct Search {
    victims: Vec<Failure>,
}

/// What a report means for the search.
#[derive(Clone, Debug, PartialEq)]
pub enum Verdict {
    /// This is it.
    Cause(Failure),
    /// Someone else is to blame; who is not yet known.
    Open,
}

impl Search {
    /// Weighs one more failure.
    pub fn weigh(&mut self, failure: Failure) -> Verdict {
        if failure.is_victim() {
            self.victims.push(failure);
            Verdict::Open
        } else {
            Verdict::Cause(failure)
        }
    }

    /// The best guess when nobody else will speak: the first victim.
    pub fn give_up(self) -> Failure {
        self.victims.into_iter().next().unwrap_or_else(|| {
            Failure::of_run(CauseKind::Internal, "the run ended without a reported failure".into())
        })
    }
}
