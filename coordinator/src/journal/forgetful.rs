//! The journal of a run without a state directory: what people may ask for, in memory, until the process
//! ends.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use coxswain_proto::{
    ids::Step,
    limits::{LEDGER_KEPT, MAX_FAULTS_KEPT},
};

use super::{History, Journal, JournalError, JournalReader, LedgerEntry};
use crate::core::{action::Record, failure::Failure, past::Past};

/// Keeps the newest [`LEDGER_KEPT`] steps, memberships, and the newest faults.
#[derive(Clone, Debug, Default)]
pub struct Forgetful(Arc<Mutex<RecentRecords>>);

#[derive(Debug, Default)]
struct RecentRecords {
    steps: VecDeque<LedgerEntry>,
    failures: VecDeque<Arc<Failure>>,
    past: Past,
}

impl Forgetful {
    fn remembered(&self) -> MutexGuard<'_, RecentRecords> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Journal for Forgetful {
    fn append(&mut self, records: &[Record]) -> Result<(), JournalError> {
        self.remembered().add_records(records);
        Ok(())
    }

    fn reader(&self) -> Box<dyn JournalReader> {
        Box::new(self.clone())
    }
}

impl RecentRecords {
    fn add_records(&mut self, records: &[Record]) {
        for record in records {
            self.past.add_record(record);
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
    }
}

impl JournalReader for Forgetful {
    fn ledger(&self, first: Step, limit: usize) -> Result<Vec<LedgerEntry>, JournalError> {
        Ok(self.remembered().steps.iter().filter(|entry| entry.step >= first).take(limit).cloned().collect())
    }

    fn history(&self) -> Result<History, JournalError> {
        let remembered = self.remembered();
        let survived = remembered.failures.iter().map(|failure| failure.as_ref().clone());
        let past = &remembered.past;
        Ok(History::new(past.end.as_ref(), past.generations.clone(), survived))
    }
}
