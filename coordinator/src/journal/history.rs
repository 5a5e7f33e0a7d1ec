//! What a journal has beside the ledger: how the run ended, who was in it, what befell it.
//!
//! One value for those who read a journal that was left behind and for those who ask the coordinator that
//! still writes it, so that both tell the same.

use coxswain_proto::ids::{Generation, Step};

use super::Change;
use crate::core::{failure::Failure, past::PastGeneration, phase::End, report::StateSource};

/// Memberships, faults, and the end.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct History {
    /// How the run ended.
    pub fate: Fate,
    /// In order.
    pub memberships: Vec<Membership>,
    /// Faults, in order; survived but for the last one of a run that failed.
    pub failures: Vec<Failure>,
    /// What resumes have changed, in order.
    pub changes: Vec<Change>,
}

/// How a run ended, if it did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Fate {
    /// It goes on, or was broken off.
    #[default]
    NotOver,
    /// Every step was committed.
    Finished,
    /// Someone asked for it.
    Stopped,
    /// The last fault was not survived.
    Failed,
}

/// One membership.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Membership {
    /// Which.
    pub generation: Generation,
    /// Workers.
    pub workers: u32,
    /// Where it started, and where its state came from; absent if it never did.
    pub started: Option<(Step, StateSource)>,
}

impl History {
    /// What these rows tell.
    pub(super) fn new(
        end: Option<&End>,
        generations: impl IntoIterator<Item = (Generation, PastGeneration)>,
        survived: impl IntoIterator<Item = Failure>,
    ) -> Self {
        let last = match end {
            Some(End::Failed(last)) => Some(last.as_ref().clone()),
            _ => None,
        };
        let membership = |(generation, of): (Generation, PastGeneration)| Membership {
            generation,
            workers: of.workers,
            started: of.started,
        };
        Self {
            fate: match end {
                None => Fate::NotOver,
                Some(End::Finished(_)) => Fate::Finished,
                Some(End::Stopped(..)) => Fate::Stopped,
                Some(End::Failed(_)) => Fate::Failed,
            },
            memberships: generations.into_iter().map(membership).collect(),
            failures: survived.into_iter().chain(last).collect(),
            changes: Vec::new(),
        }
    }
}
