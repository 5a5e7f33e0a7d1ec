//! Reads a whole journal, and names what is damaged: table, row, and what is wrong with it.

use std::path::Path;

use coxswain_proto::{
    cache_plan::Decided,
    ids::{Generation, Seat, Step},
};
use redb::{ReadTransaction, ReadableTable, TableDefinition, TableError};
use serde::de::DeserializeOwned;

use super::{
    History, Identity, JournalError, LedgerEntry,
    rows::{CACHES, FACTS, FAILURES, GENERATIONS, NODES, STEPS, TURNS, WORKERS},
};
use crate::core::{
    action::{Orders, Spent},
    cache::{GenerationEntry, Reached},
    event::DataSet,
    failure::Failure,
    past::{Past, PastGeneration, PastNode, PastSeat},
    phase::End,
    quarantine::Quarantine,
};

/// Everything that a journal holds.
#[derive(Debug, Default)]
pub struct Contents {
    /// Whose it is.
    pub identity: Option<Identity>,
    /// Starts of the coordinator.
    pub lives: u32,
    /// How the run ended.
    pub end: Option<End>,
    /// The data set.
    pub dataset: Option<DataSet>,
    /// What people wanted.
    pub orders: Orders,
    /// What was used of the budgets.
    pub spent: Spent,
    /// Samples that failed.
    pub quarantine: Quarantine,
    /// How far the run was before it was rolled back.
    pub reached: Reached,
    /// By place.
    pub nodes: Vec<(u64, PastNode)>,
    /// By seat.
    pub seats: Vec<(u64, PastSeat)>,
    /// By number.
    pub generations: Vec<(u64, PastGeneration)>,
    /// In order, without a gap.
    pub steps: Vec<LedgerEntry>,
    /// The newest fault that this launch of the run has survived.
    pub fault: Option<Failure>,
    /// In order.
    pub failures: Vec<(u64, Failure)>,
    /// By step.
    pub turns: Vec<(u64, Decided)>,
    /// By number.
    pub caches: Vec<(u64, GenerationEntry)>,
}

impl Contents {
    /// As the machine takes it.
    pub fn into_past(self) -> Past {
        let started = self.generations.iter().rev().find_map(|(_, of)| of.started);
        let committed = self.steps.last().map(|last| Step(last.step.0 + 1));
        let generations = self.generations.into_iter().map(|(number, of)| (Generation(number), of));
        Past {
            dataset: self.dataset,
            orders: self.orders,
            spent: self.spent,
            quarantine: self.quarantine,
            reached: self.reached,
            nodes: self.nodes.into_iter().map(|(place, node)| (place as u32, node)).collect(),
            seats: self.seats.into_iter().map(|(seat, kept)| (Seat(seat as u32), kept)).collect(),
            generations: generations.collect(),
            committed: committed.or(started.map(|(first, _)| first)),
            fault: self.fault.map(Into::into),
            turns: self.turns.into_iter().map(|(first, decided)| (Step(first), decided)).collect(),
            caches: self.caches.into_iter().collect(),
            end: self.end,
        }
    }
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
                let reason = format!("the row before it is of step {}: rows are missing", before.step);
                return Err(self.damaged("steps", &after.step, reason));
            }
        }
        Ok(Contents {
            identity: self.fact("identity")?,
            lives: self.fact("lives")?.unwrap_or(0),
            end: self.fact("over")?,
            dataset: self.fact("dataset")?,
            orders: self.fact("orders")?.unwrap_or_default(),
            spent: self.fact("spent")?.unwrap_or_default(),
            quarantine: self.fact("quarantine")?.unwrap_or_default(),
            reached: self.fact("reached")?.unwrap_or_default(),
            nodes: self.rows("nodes", NODES)?,
            seats: self.rows("workers", WORKERS)?,
            generations: self.rows("generations", GENERATIONS)?,
            fault: self.fact("fault")?,
            failures: self.rows("failures", FAILURES)?,
            turns: self.rows("turns", TURNS)?,
            caches: self.rows("caches", CACHES)?,
            steps,
        })
    }

    /// At most `limit` committed steps from `first` on, in order.
    pub fn steps(&self, first: Step, limit: usize) -> Result<Vec<LedgerEntry>, JournalError> {
        let Some(table) = self.table(STEPS)? else { return Ok(Vec::new()) };
        let range = table.range(first.0..).map_err(|error| self.failed(error))?;
        let rows = range.take(limit).map(|row| {
            let (key, value) = row.map_err(|error| self.failed(error))?;
            let entry: LedgerEntry = self.parsed("steps", &key.value(), value.value())?;
            if entry.step.0 != key.value() {
                let reason = format!("it says that it is step {}", entry.step);
                return Err(self.damaged("steps", &key.value(), reason));
            }
            Ok(entry)
        });
        rows.collect()
    }

    /// What there is beside the ledger.
    pub fn history(&self) -> Result<History, JournalError> {
        let end: Option<End> = self.fact("over")?;
        let generations = self.rows("generations", GENERATIONS)?;
        let survived = self.rows("failures", FAILURES)?;
        Ok(History::new(
            end.as_ref(),
            generations.into_iter().map(|(number, of)| (Generation(number), of)),
            survived.into_iter().map(|(_, failure)| failure),
        ))
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
