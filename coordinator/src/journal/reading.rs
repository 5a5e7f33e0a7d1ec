//! Reads a whole journal, and names what is damaged: table, row, and what is wrong with it.

use std::{collections::BTreeMap, path::Path};

use coxswain_proto::ids::{Generation, Slot, Step};
use redb::{ReadTransaction, ReadableTable, TableDefinition, TableError};
use serde::de::DeserializeOwned;

use super::{
    Change, History, Identity, JournalError, LedgerEntry,
    rows::{CACHE_PHASES, CACHES, FACTS, FAILURES, GENERATIONS, NODES, STEPS, WORKERS},
};
use crate::core::{
    failure::Failure,
    past::{Past, PastGeneration},
    phase::End,
};

/// Everything that a journal holds.
#[derive(Debug, Default)]
pub struct Contents {
    /// Whose it is.
    pub identity: Option<Identity>,
    /// Starts of the coordinator.
    pub lives: u32,
    /// What the machine takes over.
    pub past: Past,
    /// In order, without a gap.
    pub steps: Vec<LedgerEntry>,
    /// Faults that were survived, in order.
    pub failures: Vec<Failure>,
    /// What resumes have changed, in order.
    pub changes: Vec<Change>,
}

/// Reads tables within one transaction.
pub struct Reader<'a> {
    read: &'a ReadTransaction,
    directory: &'a Path,
}

impl<'a> Reader<'a> {
    /// Reads what `read` sees of the journal in `directory`.
    pub fn new(read: &'a ReadTransaction, directory: &'a Path) -> Self {
        Self { read, directory }
    }

    /// All of it.
    pub fn everything(&self) -> Result<Contents, JournalError> {
        let steps = self.steps(Step(0), usize::MAX)?;
        for (before, after) in steps.iter().zip(steps.iter().skip(1)) {
            if after.step.0 != before.step.0 + 1 {
                let reason = format!("the row before it is of step {}, so rows are missing", before.step);
                return Err(self.damaged("steps", &after.step, reason));
            }
        }
        let (identity, lives) = (self.fact("identity")?, self.fact("lives")?.unwrap_or(0));
        let past = self.past(&steps)?;
        let failures = self.rows("failures", FAILURES)?.into_iter().map(|(_, failure)| failure).collect();
        let changes = self.fact("changes")?.unwrap_or_default();
        Ok(Contents { identity, lives, past, steps, failures, changes })
    }

    /// What the machine takes over, where these are the committed steps.
    fn past(&self, steps: &[LedgerEntry]) -> Result<Past, JournalError> {
        let generations: BTreeMap<_, PastGeneration> =
            self.numbered("generations", GENERATIONS, Generation)?;
        let started = generations.values().rev().find_map(|of| of.started);
        let committed = steps.last().map(|last| Step(last.step.0 + 1));
        Ok(Past {
            end: self.fact("over")?,
            dataset: self.fact("dataset")?,
            orders: self.fact("orders")?.unwrap_or_default(),
            spent: self.fact("spent")?.unwrap_or_default(),
            quarantine: self.fact("quarantine")?.unwrap_or_default(),
            health: self.fact("health")?.unwrap_or_default(),
            reached: self.fact("reached")?.unwrap_or_default(),
            nodes: self.numbered("nodes", NODES, |place| place as u32)?,
            slots: self.numbered("workers", WORKERS, |slot| Slot(slot as u32))?,
            generations,
            committed: committed.or(started.map(|(first, _)| first)),
            skipped: steps.iter().filter(|step| step.skipped.is_some()).map(|step| step.step).collect(),
            fault: self.fact::<Failure>("fault")?.map(Into::into),
            cache_phases: self.numbered("turns", CACHE_PHASES, Step)?,
            caches: self.numbered("caches", CACHES, |number| number)?,
        })
    }

    fn numbered<K: Ord, T: DeserializeOwned>(
        &self,
        name: &'static str,
        table: TableDefinition<u64, &str>,
        key: impl Fn(u64) -> K,
    ) -> Result<BTreeMap<K, T>, JournalError> {
        Ok(self.rows(name, table)?.into_iter().map(|(number, row)| (key(number), row)).collect())
    }

    /// At most `limit` committed steps from `first` on, in order.
    pub fn steps(&self, first: Step, limit: usize) -> Result<Vec<LedgerEntry>, JournalError> {
        let Some(table) = self.table(STEPS)? else { return Ok(Vec::new()) };
        let range = table.range(first.0..).map_err(|error| self.failed(error))?;
        let rows = range.take(limit).map(|row| {
            let (key, value) = row.map_err(|error| self.failed(error))?;
            let entry: LedgerEntry = self.parsed("steps", &key.value(), value.value())?;
            if entry.step.0 != key.value() {
                let reason = format!("it holds the record of step {}", entry.step);
                return Err(self.damaged("steps", &key.value(), reason));
            }
            Ok(entry)
        });
        rows.collect()
    }

    /// What there is beside the ledger.
    pub fn history(&self) -> Result<History, JournalError> {
        let end: Option<End> = self.fact("over")?;
        let generations: BTreeMap<_, _> = self.numbered("generations", GENERATIONS, Generation)?;
        let survived = self.rows("failures", FAILURES)?;
        let changes = self.fact("changes")?.unwrap_or_default();
        let survived = survived.into_iter().map(|(_, failure)| failure);
        Ok(History { changes, ..History::new(end.as_ref(), generations, survived) })
    }

    fn rows<T: DeserializeOwned>(
        &self,
        name: &'static str,
        table: TableDefinition<u64, &str>,
    ) -> Result<Vec<(u64, T)>, JournalError> {
        let Some(table) = self.table(table)? else { return Ok(Vec::new()) };
        let rows = table.iter().map_err(|error| self.failed(error))?.map(|row| {
            let (key, value) = row.map_err(|error| self.failed(error))?;
            Ok((key.value(), self.parsed(name, &key.value(), value.value())?))
        });
        rows.collect()
    }

    fn fact<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>, JournalError> {
        let Some(table) = self.table(FACTS)? else { return Ok(None) };
        let value = table.get(name).map_err(|error| self.failed(error))?;
        value.map(|value| self.parsed("facts", &name, value.value())).transpose()
    }

    fn parsed<T: DeserializeOwned>(
        &self,
        table: &'static str,
        row: &dyn std::fmt::Display,
        text: &str,
    ) -> Result<T, JournalError> {
        serde_json::from_str(text).map_err(|error| self.damaged(table, row, error.to_string()))
    }

    fn table<K: redb::Key + 'static>(
        &self,
        table: TableDefinition<K, &'static str>,
    ) -> Result<Option<redb::ReadOnlyTable<K, &'static str>>, JournalError> {
        match self.read.open_table(table) {
            Ok(table) => Ok(Some(table)),
            Err(TableError::TableDoesNotExist(_)) => Ok(None),
            Err(error) => Err(self.failed(error)),
        }
    }

    fn damaged(&self, table: &'static str, row: &dyn std::fmt::Display, reason: String) -> JournalError {
        JournalError::Damaged { directory: self.directory.to_path_buf(), table, row: row.to_string(), reason }
    }

    fn failed(&self, error: impl std::fmt::Display) -> JournalError {
        JournalError::Store {
            action: "read",
            directory: self.directory.to_path_buf(),
            reason: error.to_string(),
        }
    }
}
