//! The journal's tables, and what each record writes to them.
//!
//! ```text
//! facts         name -> JSON      identity, lives, dataset, orders, spent, quarantine, health, reached,
//!                                 fault, over
//! nodes         place -> JSON     launcher, host
//! workers       slot -> JSON      id, claim; or what its launcher was asked to do
//! generations   number -> JSON    members, where it started, whether it is over
//! steps         step -> JSON      the ledger
//! failures      number -> JSON    faults, in order, the newest so many
//! turns         step -> JSON      cache phases: from which steps on which generation of features serves
//! caches        number -> JSON    generations of the feature cache, the newest so many
//! ```

use coxswain_proto::limits::{MAX_CACHE_PHASES, MAX_FAULTS_KEPT, MAX_GENERATIONS_KEPT};
use redb::{Builder, ReadableTable, ReadableTableMetadata, TableDefinition, WriteTransaction};
use serde::{Serialize, de::DeserializeOwned};

use super::LedgerEntry;
use crate::core::{
    action::Record,
    cache::GENERATIONS_KEPT,
    failure::Failure,
    past::{Past, PastGeneration, PastNode, PastSlot},
};

pub const FACTS: TableDefinition<&str, &str> = TableDefinition::new("facts");
pub const NODES: TableDefinition<u64, &str> = TableDefinition::new("nodes");
pub const WORKERS: TableDefinition<u64, &str> = TableDefinition::new("workers");
pub const GENERATIONS: TableDefinition<u64, &str> = TableDefinition::new("generations");
pub const FAILURES: TableDefinition<u64, &str> = TableDefinition::new("failures");
pub const STEPS: TableDefinition<u64, &str> = TableDefinition::new("steps");
pub const CACHE_PHASES: TableDefinition<u64, &str> = TableDefinition::new("turns");
pub const CACHES: TableDefinition<u64, &str> = TableDefinition::new("caches");

/// Bytes of its pages that the store keeps in memory; a gibibyte unless told otherwise. What is read is read
/// once, when it is opened.
const PAGES_KEPT: usize = 8 << 20;

/// The store of these tables, to be opened.
pub fn store() -> Builder {
    let mut store = Builder::new();
    store.set_cache_size(PAGES_KEPT);
    store
}

/// Writes one record's effect.
pub fn append(write: &WriteTransaction, record: &Record) -> Result<(), redb::Error> {
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
        Record::Over(end) => fact("over", json(end)),
        Record::RolledBack(reached) => fact("reached", json(reached)),
        Record::Quarantine(quarantine) => fact("quarantine", json(quarantine)),
        Record::Health(health) => fact("health", json(health)),
        Record::Node { place, node_id, host, version } => {
            let (node_id, host, version) = (node_id.clone(), host.clone(), version.clone());
            row(NODES, (*place).into(), json(&PastNode { node_id, host, version }))
        }
        Record::NodeGone { place } => {
            write.open_table(NODES)?.remove(u64::from(*place))?;
            Ok(())
        }
        Record::Worker(id, claim) => {
            change(write, WORKERS, claim.slot.0.into(), |stored: &mut PastSlot| stored.taken(*id, claim))
        }
        Record::Lost { slot, respawn } => {
            let lost = PastSlot { respawn: respawn.clone(), ..PastSlot::default() };
            row(WORKERS, slot.0.into(), json(&lost))
        }
        Record::Left { slot, exit_code } => {
            change(write, WORKERS, slot.0.into(), |stored: &mut PastSlot| stored.left = Some(*exit_code))
        }
        Record::Generation { generation, members } => {
            forget_members(write, generation.0, |past| past.started.is_none())?;
            let oldest = generation.0.saturating_sub(MAX_GENERATIONS_KEPT as u64 - 1);
            write.open_table(GENERATIONS)?.retain_in(..oldest, |_, _| false)?;
            row(GENERATIONS, generation.0, json(&PastGeneration::formed(members)))
        }
        Record::Started { generation, first_step, source } => {
            forget_members(write, generation.0, |_| true)?;
            change(write, GENERATIONS, generation.0, |stored: &mut PastGeneration| {
                stored.started = Some((*first_step, *source));
            })?;
            write.open_table(STEPS)?.retain_in(first_step.0.., |_, _| false)?;
            Ok(())
        }
        Record::Broken { generation } => {
            change(write, GENERATIONS, generation.0, |stored: &mut PastGeneration| stored.over = true)
        }
        Record::Step(step) => row(STEPS, step.step.0, json(&LedgerEntry::from(step.as_ref()))),
        Record::CachePhase(decided) => {
            write.open_table(CACHE_PHASES)?.retain_in(decided.first.0.., |_, _| false)?;
            row(CACHE_PHASES, decided.first.0, json(decided))?;
            keep_newest(write, CACHE_PHASES, MAX_CACHE_PHASES)
        }
        Record::CacheGeneration(entry) => {
            row(CACHES, entry.number, json(entry))?;
            keep_newest(write, CACHES, GENERATIONS_KEPT)
        }
        Record::Failure(failure) => {
            append_failure(write, failure)?;
            fact("fault", json(failure.as_ref()))
        }
    }
}

/// As [`Past`] does: forgets the oldest of more than `most`.
fn keep_newest(
    write: &WriteTransaction,
    table: TableDefinition<u64, &str>,
    most: usize,
) -> Result<(), redb::Error> {
    let mut table = write.open_table(table)?;
    while table.len()? > most as u64 {
        table.pop_first()?;
    }
    Ok(())
}

fn append_failure(write: &WriteTransaction, failure: &Failure) -> Result<(), redb::Error> {
    let mut failures = write.open_table(FAILURES)?;
    let last = failures.last()?.map(|(number, row)| (number.value(), row.value().to_owned()));
    let number = match last {
        // The same fault again, now that its victims are known.
        Some((number, row)) if holds(&row, failure) => number,
        Some((number, _)) => number + 1,
        None => 0,
    };
    failures.insert(number, json(failure).as_str())?;
    failures.retain_in(..number.saturating_sub(MAX_FAULTS_KEPT - 1), |_, _| false)?;
    Ok(())
}

/// Writes all that a machine remembers in the place of what is there; the records (steps, faults) are left
/// alone.
pub fn replace(write: &WriteTransaction, past: &Past) -> Result<(), redb::Error> {
    let mut facts = write.open_table(FACTS)?;
    for (name, value) in [
        ("dataset", past.dataset.as_ref().map(json)),
        ("orders", Some(json(&past.orders))),
        ("spent", Some(json(&past.spent))),
        ("quarantine", Some(json(&past.quarantine))),
        ("health", Some(json(&past.health))),
        ("reached", Some(json(&past.reached))),
        ("fault", past.fault.as_ref().map(|fault| json(fault.as_ref()))),
        ("over", past.end.as_ref().map(json)),
    ] {
        match value {
            Some(value) => facts.insert(name, value.as_str())?,
            None => facts.remove(name)?,
        };
    }
    refill(write, NODES, past.nodes.iter().map(|(place, node)| (u64::from(*place), json(node))))?;
    refill(write, WORKERS, past.slots.iter().map(|(slot, kept)| (u64::from(slot.0), json(kept))))?;
    refill(write, GENERATIONS, past.generations.iter().map(|(number, of)| (number.0, json(of))))?;
    refill(write, CACHE_PHASES, past.cache_phases.iter().map(|(first, decided)| (first.0, json(decided))))?;
    refill(write, CACHES, past.caches.iter().map(|(number, entry)| (*number, json(entry))))
}

fn refill(
    write: &WriteTransaction,
    table: TableDefinition<u64, &str>,
    rows: impl Iterator<Item = (u64, String)>,
) -> Result<(), redb::Error> {
    let mut table = write.open_table(table)?;
    table.retain(|_, _| false)?;
    for (key, row) in rows {
        table.insert(key, row.as_str())?;
    }
    Ok(())
}

/// As [`Past`] does: the members of older generations do not matter any more.
fn forget_members(
    write: &WriteTransaction,
    before: u64,
    of: impl Fn(&PastGeneration) -> bool,
) -> Result<(), redb::Error> {
    let mut table = write.open_table(GENERATIONS)?;
    let mut found = Vec::new();
    for row in table.range(..before)?.rev() {
        let (number, row) = row?;
        let Ok(past) = serde_json::from_str::<PastGeneration>(row.value()) else { break };
        if past.is_forgotten() {
            break;
        }
        if of(&past) && !past.members.is_empty() {
            found.push((number.value(), PastGeneration { members: Vec::new(), ..past }));
        }
    }
    for (number, past) in found {
        table.insert(number, json(&past).as_str())?;
    }
    Ok(())
}

/// Whether a row is of this failure.
fn holds(row: &str, failure: &Failure) -> bool {
    serde_json::from_str::<Failure>(row).is_ok_and(|stored| stored.is_same(failure))
}

fn change<T: Default + Serialize + DeserializeOwned>(
    write: &WriteTransaction,
    table: TableDefinition<u64, &str>,
    key: u64,
    change: impl FnOnce(&mut T),
) -> Result<(), redb::Error> {
    let mut table = write.open_table(table)?;
    let found = table.get(key)?.and_then(|value| serde_json::from_str(value.value()).ok());
    let mut stored: T = found.unwrap_or_default();
    change(&mut stored);
    table.insert(key, json(&stored).as_str())?;
    Ok(())
}

/// A row's value.
pub fn json(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect("journal rows are plain structs of numbers and strings")
}
