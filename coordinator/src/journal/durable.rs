//! The journal on disk: one embedded database, `journal.redb`, in the state directory.
//!
//! ```text
//! facts         name -> JSON      identity, lives, dataset, orders, spent, over
//! nodes         place -> JSON     launcher, host
//! workers       seat -> JSON      id, claim; or what its launcher was asked to do
//! generations   number -> JSON    members, where it started, whether it is over
//! steps         step -> JSON      the ledger
//! checkpoints   step -> JSON
//! failures      number -> JSON    faults, in order
//! ```

use std::path::{Path, PathBuf};

use coxswain_proto::{
    document,
    ids::{Generation, Seat, Step, WorkerId},
    run_spec::RunSpec,
};
use redb::{Database, DatabaseError, ReadableDatabase, ReadableTable, TableDefinition, WriteTransaction};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use super::{Identity, Journal, JournalError, LedgerEntry, Memory};
use crate::core::{
    action::Record,
    event::{DataSet, WorkerClaim},
    report::StateSource,
    roster::Respawn,
};

const FILE: &str = "journal.redb";
const FACTS: TableDefinition<&str, &str> = TableDefinition::new("facts");
const NODES: TableDefinition<u64, &str> = TableDefinition::new("nodes");
const WORKERS: TableDefinition<u64, &str> = TableDefinition::new("workers");
const GENERATIONS: TableDefinition<u64, &str> = TableDefinition::new("generations");
const FAILURES: TableDefinition<u64, &str> = TableDefinition::new("failures");
const STEPS: TableDefinition<u64, &str> = TableDefinition::new("steps");
const CHECKPOINTS: TableDefinition<u64, &str> = TableDefinition::new("checkpoints");

/// A journal on disk.
pub struct Durable {
    database: Database,
    directory: PathBuf,
}

#[derive(Serialize, Deserialize)]
struct StoredNode {
    node_id: String,
    host: String,
}

#[derive(Serialize, Deserialize)]
struct StoredSeat {
    worker: Option<(WorkerId, WorkerClaim)>,
    respawn: Option<Respawn>,
}

#[derive(Default, Serialize, Deserialize)]
struct StoredGeneration {
    members: Vec<(Seat, WorkerId)>,
    started: Option<(Step, StateSource)>,
    over: bool,
}

#[derive(Serialize)]
struct StoredEnd<'a> {
    phase: String,
    reason: &'a str,
}

impl Durable {
    /// Opens the journal of a run, or begins one. Without a `run_id` of its own the run takes the journal's, or else `fresh`.
    ///
    /// Refuses the journal of another run, and one that is open elsewhere.
    pub fn open(
        directory: &Path,
        spec: &RunSpec,
        run_id: Option<&str>,
        fresh: &str,
    ) -> Result<(Self, Identity, Memory), JournalError> {
        let store = |reason: String| JournalError::Store {
            action: "open",
            directory: directory.to_path_buf(),
            reason,
        };
        std::fs::create_dir_all(directory).map_err(|error| store(error.to_string()))?;
        let database = Database::create(directory.join(FILE)).map_err(|error| match error {
            DatabaseError::DatabaseAlreadyOpen => JournalError::InUse { directory: directory.to_path_buf() },
            other => store(other.to_string()),
        })?;
        let mut journal = Self { database, directory: directory.to_path_buf() };
        let found: Option<Identity> = journal.fact("identity")?;
        let run_id =
            run_id.or(found.as_ref().map(|identity| identity.run_id.as_str())).unwrap_or(fresh).to_owned();
        let ours = Identity::new(spec, run_id);
        if let Some(theirs) = found {
            journal.must_be_ours(theirs, &ours, spec)?;
        }
        let memory = journal.remember()?;
        journal.begin_life(&ours, memory.lives + 1)?;
        Ok((journal, ours, memory))
    }

    fn must_be_ours(&self, theirs: Identity, ours: &Identity, spec: &RunSpec) -> Result<(), JournalError> {
        if theirs.run_id == ours.run_id && theirs.spec_digest == ours.spec_digest {
            return Ok(());
        }
        let difference = match serde_json::from_str::<RunSpec>(&theirs.spec) {
            _ if theirs.spec_digest == ours.spec_digest => {
                "the specification is the same, the run id is not".to_owned()
            }
            Ok(other) => {
                let differences = document::differences(&other, spec);
                let told: Vec<_> = differences.iter().take(4).map(ToString::to_string).collect();
                format!("it differs in {}", told.join(", "))
            }
            Err(_) => "its specification is of another version".to_owned(),
        };
        Err(JournalError::OtherRun {
            directory: self.directory.clone(),
            theirs: Box::new(theirs),
            ours: Box::new(ours.clone()),
            difference,
        })
    }

    fn remember(&self) -> Result<Memory, JournalError> {
        let lives = self.fact("lives")?.unwrap_or(0);
        let dataset: Option<DataSet> = self.fact("dataset")?;
        let read = self.database.begin_read().map_err(|error| self.failed("read", error))?;
        let generation = match read.open_table(GENERATIONS) {
            Ok(table) => {
                let last = table.last().map_err(|error| self.failed("read", error))?;
                Generation(last.map_or(0, |(number, _)| number.value()))
            }
            Err(redb::TableError::TableDoesNotExist(_)) => Generation(0),
            Err(error) => return Err(self.failed("read", error)),
        };
        Ok(Memory { lives, generation, dataset })
    }

    fn begin_life(&mut self, identity: &Identity, life: u32) -> Result<(), JournalError> {
        self.write(|write| {
            let mut facts = write.open_table(FACTS)?;
            facts.insert("identity", json(identity).as_str())?;
            facts.insert("lives", json(&life).as_str())?;
            facts.remove("over")?;
            // Every table exists from here on.
            write.open_table(GENERATIONS)?;
            write.open_table(STEPS)?;
            write.open_table(CHECKPOINTS)?;
            write.open_table(NODES)?;
            write.open_table(WORKERS)?;
            write.open_table(FAILURES)?;
            Ok(())
        })
    }

    fn fact<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>, JournalError> {
        let read = self.database.begin_read().map_err(|error| self.failed("read", error))?;
        let table = match read.open_table(FACTS) {
            Ok(table) => table,
            Err(redb::TableError::TableDoesNotExist(_)) => return Ok(None),
            Err(error) => return Err(self.failed("read", error)),
        };
        let value = table.get(name).map_err(|error| self.failed("read", error))?;
        let Some(value) = value else { return Ok(None) };
        let fact = serde_json::from_str(value.value()).map_err(|error| self.failed("read", error))?;
        Ok(Some(fact))
    }

    /// One durable transaction.
    fn write(
        &mut self,
        body: impl FnOnce(&WriteTransaction) -> Result<(), redb::Error>,
    ) -> Result<(), JournalError> {
        let run = || -> Result<(), redb::Error> {
            let write = self.database.begin_write()?;
            body(&write)?;
            write.commit()?;
            Ok(())
        };
        run().map_err(|error| self.failed("write", error))
    }

    fn failed(&self, action: &'static str, error: impl std::fmt::Display) -> JournalError {
        JournalError::Store { action, directory: self.directory.clone(), reason: error.to_string() }
    }
}

impl Journal for Durable {
    fn append(&mut self, records: &[Record]) -> Result<(), JournalError> {
        self.write(|write| records.iter().try_for_each(|record| append_one(write, record)))
    }

    fn ledger(&self, first: Step, limit: usize) -> Result<Vec<LedgerEntry>, JournalError> {
        let read = self.database.begin_read().map_err(|error| self.failed("read", error))?;
        let table = read.open_table(STEPS).map_err(|error| self.failed("read", error))?;
        let range = table.range(first.0..).map_err(|error| self.failed("read", error))?;
        range
            .take(limit)
            .map(|row| {
                let (_, value) = row.map_err(|error| self.failed("read", error))?;
                serde_json::from_str(value.value()).map_err(|error| self.failed("read", error))
            })
            .collect()
    }
}

fn append_one(write: &WriteTransaction, record: &Record) -> Result<(), redb::Error> {
    let fact = |name: &str, value: String| -> Result<(), redb::Error> {
        write.open_table(FACTS)?.insert(name, value.as_str())?;
        Ok(())
    };
    let row = |table, key: u64, value: String| -> Result<(), redb::Error> {
        write.open_table(table)?.insert(key, value.as_str())?;
        Ok(())
    };
    match record {
        Record::DataSet(dataset) => fact("dataset", json(dataset)),
        Record::Orders(orders) => fact("orders", json(orders)),
        Record::Spent(spent) => fact("spent", json(spent)),
        Record::Over { phase, reason } => fact("over", json(&StoredEnd { phase: phase.to_string(), reason })),
        Record::Node { place, node_id, host } => {
            let node = StoredNode { node_id: node_id.clone(), host: host.clone() };
            row(NODES, (*place).into(), json(&node))
        }
        Record::NodeGone { place } => {
            write.open_table(NODES)?.remove(u64::from(*place))?;
            Ok(())
        }
        Record::Worker(id, claim) => {
            let worker = StoredSeat { worker: Some((*id, claim.clone())), respawn: None };
            row(WORKERS, claim.seat.0.into(), json(&worker))
        }
        Record::Lost { seat, respawn } => {
            let lost = StoredSeat { worker: None, respawn: respawn.clone() };
            row(WORKERS, seat.0.into(), json(&lost))
        }
        Record::Generation { generation, members } => {
            let stored = StoredGeneration { members: members.clone(), started: None, over: false };
            row(GENERATIONS, generation.0, json(&stored))
        }
        Record::Started { generation, first_step, source } => {
            change_generation(write, *generation, |stored| stored.started = Some((*first_step, *source)))?;
            write.open_table(STEPS)?.retain_in(first_step.0.., |_, _| false)?;
            Ok(())
        }
        Record::Broken { generation } => change_generation(write, *generation, |stored| stored.over = true),
        Record::Step(step) => row(STEPS, step.step.0, json(&LedgerEntry::from(step.as_ref()))),
        Record::Checkpoint(entry) => row(CHECKPOINTS, entry.step.0, json(entry)),
        Record::Failure(failure) => {
            let mut failures = write.open_table(FAILURES)?;
            let next = failures.last()?.map_or(0, |(number, _)| number.value() + 1);
            failures.insert(next, json(failure.as_ref()).as_str())?;
            Ok(())
        }
    }
}

fn change_generation(
    write: &WriteTransaction,
    generation: Generation,
    change: impl FnOnce(&mut StoredGeneration),
) -> Result<(), redb::Error> {
    let mut table = write.open_table(GENERATIONS)?;
    let found = table.get(generation.0)?.and_then(|value| serde_json::from_str(value.value()).ok());
    let mut stored: StoredGeneration = found.unwrap_or_default();
    change(&mut stored);
    table.insert(generation.0, json(&stored).as_str())?;
    Ok(())
}

fn json(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect("journal rows are plain structs of numbers and strings")
}
