//! Failures, and the event that a failure begins: what was lost, who suffered from it, when training went on.
//!
//! One rank's fault breaks its neighbours' connections, so a fault is usually told by several ranks at once
//! and the victims may speak first. An [`Incident`] collects what belongs together, from the first sign until
//! the next generation starts. Its cause is the first failure that is not a victim's; a victim's only if
//! no worker was lost until all were ready again.

use std::{collections::BTreeSet, fmt, ops::Range, sync::Arc};

use coxswain_proto::{
    human,
    ids::{Bytes, Generation, Slot, Step},
};
use serde::{Deserialize, Serialize};

use super::{quarantine::BadSample, report::WorkerPhase, time::Timestamp};
use crate::options::{CauseKind, FirstCause};

/// One failure, with everything needed to name it in a line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// What kind.
    pub kind: CauseKind,
    /// Whose, if it is one worker's.
    #[serde(rename = "seat")]
    pub slot: Option<Slot>,
    /// On which machine.
    pub host: String,
    /// In which membership.
    pub generation: Generation,
    /// What the worker was doing.
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
    /// Workers that failed because of it.
    pub victims: BTreeSet<Slot>,
    /// The run ended with it.
    pub fatal: bool,
}

impl Failure {
    /// A failure of the run as a whole.
    pub fn of_run(kind: CauseKind, message: String) -> Self {
        Self {
            kind,
            slot: None,
            host: String::new(),
            generation: Generation(0),
            phase: WorkerPhase::Joining,
            step: Step(0),
            collective: 0,
            positions: Vec::new(),
            memory_in_use: Bytes(0),
            message,
            victims: BTreeSet::new(),
            fatal: false,
        }
    }

    /// Whether it is the same failure, whatever its victims.
    pub fn is_same(&self, other: &Self) -> bool {
        Self { victims: other.victims.clone(), ..self.clone() } == *other
    }

    /// What the run's outcome says of it.
    pub fn first_cause(&self) -> FirstCause {
        FirstCause { slot: self.slot, kind: self.kind, message: self.message.clone() }
    }
}

impl fmt::Display for Failure {
    /// `rank 1 on node-b, forward of step 57, positions 12..14, 3.2 GiB in use: MESSAGE`. Where a lost worker
    /// was is its last heartbeat's word, which may be some steps old.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(slot) = self.slot else { return f.write_str(&self.message) };
        write!(f, "rank {slot}")?;
        if !self.host.is_empty() {
            write!(f, " on {}", self.host)?;
        }
        match self.phase.is_before_steps() {
            true => write!(f, ", {}", self.phase)?,
            false if matches!(self.kind, CauseKind::WorkerLost | CauseKind::KilledForMemory) => {
                write!(f, ", last heard of in phase {} of step {}", self.phase, self.step)?;
            }
            false => write!(f, ", {} of step {}", self.phase, self.step)?,
        }
        for positions in &self.positions {
            write!(f, ", positions {}..{}", positions.start, positions.end)?;
        }
        if self.memory_in_use > Bytes(0) {
            write!(f, ", {} in use", human::bytes(self.memory_in_use.0))?;
        }
        write!(f, ": {}", self.message)
    }
}

/// What ended a generation, or keeps the next from starting.
#[derive(Clone, Debug, PartialEq)]
pub struct Incident {
    /// The first sign of it.
    pub since: Timestamp,
    /// True when the membership changes because it was asked to.
    pub on_purpose: bool,
    /// What is to blame, once it is known.
    pub cause: Option<Arc<Failure>>,
    /// What the first victim said.
    pub complaint: Option<Failure>,
    /// The victims.
    pub victims: BTreeSet<Slot>,
    /// Workers that were lost.
    pub lost: BTreeSet<Slot>,
    /// The sample that failed, if it was one.
    pub sample: Option<BadSample>,
}

impl Incident {
    /// It begins.
    pub fn new(since: Timestamp) -> Self {
        Self {
            since,
            on_purpose: false,
            cause: None,
            complaint: None,
            victims: BTreeSet::new(),
            lost: BTreeSet::new(),
            sample: None,
        }
    }

    /// A worker was lost. True when this is one more fault to pay for: the incident's first loss, or a worker
    /// lost again.
    pub fn lose(&mut self, slot: Slot) -> bool {
        self.victims.remove(&slot);
        let first = self.lost.is_empty();
        !self.lost.insert(slot) || first
    }

    /// Cause, with its victims.
    pub fn suffered(&self) -> Option<Arc<Failure>> {
        let cause = Failure::clone(self.cause.as_ref()?);
        Some(Arc::new(Failure { victims: self.victims.clone(), ..cause }))
    }

    /// What happened, as a clause: `rank 1 was lost`.
    pub fn what(&self) -> String {
        let ranks: Vec<_> = self.lost.iter().take(4).map(Slot::to_string).collect();
        let more = if self.lost.len() > ranks.len() { ", ..." } else { "" };
        match self.lost.len() {
            _ if self.on_purpose => "a change of membership was requested".into(),
            0 => match &self.sample {
                Some(sample) => format!("{sample} failed"),
                None => "ranks lost their connections to each other".into(),
            },
            1 => format!("rank {} was lost", ranks.join("")),
            _ => format!("ranks {}{more} were lost", ranks.join(", ")),
        }
    }
}

/// How a run ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum End {
    /// Every step was committed and every worker left in order.
    Finished(Step),
    /// Someone asked for it.
    Stopped(Step, String),
    /// The first cause.
    Failed(#[serde(with = "shared")] Arc<Failure>),
}

impl End {
    /// Whether the run ended as it was meant to.
    pub fn in_order(&self) -> bool {
        !matches!(self, Self::Failed(_))
    }
}

/// What a run has used of its budgets.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpentBudgets {
    /// Faults survived.
    pub restarts: u32,
    /// Changes of the world on purpose.
    pub rescales: u32,
    /// Generations in a row that ended without a committed step.
    #[serde(rename = "barren")]
    pub stalled: u32,
    /// The workers that were lost with the last of them.
    #[serde(default)]
    #[serde(rename = "barren_seats")]
    pub stalled_slots: BTreeSet<Slot>,
    /// The failure that ends the run as soon as its survivors have written a checkpoint.
    #[serde(default)]
    pub closing: Option<Box<Failure>>,
}

/// Failures that are shared in memory, as serde sees them.
pub mod shared {
    use std::sync::Arc;

    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    use super::Failure;

    /// As the failure itself.
    pub fn serialize<S: Serializer>(failure: &Arc<Failure>, serializer: S) -> Result<S::Ok, S::Error> {
        failure.as_ref().serialize(serializer)
    }

    /// As the failure itself.
    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Arc<Failure>, D::Error> {
        Failure::deserialize(deserializer).map(Arc::new)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn where_a_lost_worker_was_is_its_last_heartbeats_word() {
        let told = |kind| {
            let (phase, step) = (WorkerPhase::Forward, Step(12));
            let of_run = Failure::of_run(kind, "why".into());
            Failure { slot: Some(Slot(1)), host: "node-b".into(), phase, step, ..of_run }.to_string()
        };
        assert_eq!(told(CauseKind::Numeric), "rank 1 on node-b, forward of step 12: why");
        let lost = "rank 1 on node-b, last heard of in phase forward of step 12: why";
        assert_eq!(told(CauseKind::WorkerLost), lost);
    }
}
