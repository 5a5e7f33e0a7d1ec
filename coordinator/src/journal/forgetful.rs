//! The journal of a run without a state directory: what people may ask for, in memory, until the process
//! ends.

use std::{collections::VecDeque, sync::Arc};

use coxswain_proto::{
    ids::Step,
    limits::{LEDGER_KEPT, MAX_FAULTS_KEPT},
};

use super::{History, Journal, JournalError, LedgerEntry};
use crate::core::{action::Record, failure::Failure, past::Past};

/// Keeps the newest [`LEDGER_KEPT`] steps, memberships, and the newest faults.
#[derive(Debug, Default)]
pub struct Forgetful {
    steps: VecDeque<LedgerEntry>,
    failures: VecDeque<Arc<Failure>>,
    past: Past,
}

impl Journal for Forgetful {
    fn append(&mut self, records: &[Record]) -> Result<(), JournalError> {
        for record in records {
            self.past.take(record);
            match record {
                Record::Step(step) => self.steps.push_back(LedgerEntry::from(step.as_ref())),
                Record::Started { first_step, .. } => {
                    self.steps.retain(|entry| entry.step < *first_step);
                }
                Record::Failure(failure) => {
                    // The same fault again, now that its victims are known.
                    self.failures.pop_back_if(|newest| newest.is_same(failure));
                    self.failures.push_back(failure.clone());
                }
                _ => {}
            }
        }
        let surplus = self.steps.len().saturating_sub(LEDGER_KEPT);
        self.steps.drain(..surplus);
        let surplus = self.failures.len().saturating_sub(MAX_FAULTS_KEPT as usize);
        self.failures.drain(..surplus);
        Ok(())
    }

    fn ledger(&self, first: Step, limit: usize) -> Result<Vec<LedgerEntry>, JournalError> {
        Ok(self.steps.iter().filter(|entry| entry.step >= first).take(limit).cloned().collect())
    }

    fn history(&self) -> Result<History, JournalError> {
        let survived = self.failures.iter().map(|failure| failure.as_ref().clone());
        Ok(History::new(self.past.end.as_ref(), self.past.generations.clone(), survived))
    }
}
