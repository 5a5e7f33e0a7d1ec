//! The journal of a run without a state directory: the newest steps, in memory, until the process ends.

use std::collections::VecDeque;

use coxswain_proto::{ids::Step, limits::LEDGER_KEPT};

use super::{Journal, JournalError, LedgerEntry};
use crate::core::action::Record;

/// Keeps the newest [`LEDGER_KEPT`] steps, and nothing else.
#[derive(Debug, Default)]
pub struct Forgetful {
    steps: VecDeque<LedgerEntry>,
}

impl Journal for Forgetful {
    fn append(&mut self, records: &[Record]) -> Result<(), JournalError> {
        for record in records {
            match record {
                Record::Step(step) => self.steps.push_back(LedgerEntry::from(step.as_ref())),
                Record::Started { first_step, .. } => {
                    self.steps.retain(|entry| entry.step < *first_step);
                }
                _ => {}
            }
        }
        let surplus = self.steps.len().saturating_sub(LEDGER_KEPT);
        self.steps.drain(..surplus);
        Ok(())
    }

    fn ledger(&self, first: Step, limit: usize) -> Result<Vec<LedgerEntry>, JournalError> {
        Ok(self.steps.iter().filter(|entry| entry.step >= first).take(limit).cloned().collect())
    }
}
