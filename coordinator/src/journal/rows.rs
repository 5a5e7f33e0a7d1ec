//! The journal's tables, and what each record writes to them.
//!
//! ```text
//! facts         name -> JSON      identity, lives, dataset, orders, spent, quarantine, over
//! nodes         place -> JSON     launcher, host
//! workers       seat -> JSON      id, claim; or what its launcher was asked to do
//! generations   number -> JSON    members, where it started, whether it is over
//! steps         step -> JSON      the ledger
//! checkpoints   step -> JSON
//! failures      number -> JSON    faults, in order
//! turns         step -> JSON      from which steps on which generation of the feature cache serves
//! caches        number -> JSON    generations of the feature cache
//! ```

use redb::{ReadableTable, TableDefinition, WriteTransaction};
use serde::{Serialize, de::DeserializeOwned};

use super::LedgerEntry;
use crate::core::{
    action::Record,
    failure::Failure,
    past::{PastGeneration, PastNode, PastSeat},
};

pub const FACTS: TableDefinition<&str, &str> = TableDefinition::new("facts");
pub const NODES: TableDefinition<u64, &str> = TableDefinition::new("nodes");
pub const WORKERS: TableDefinition<u64, &str> = TableDefinition::new("workers");
pub const GENERATIONS: TableDefinition<u64, &str> = TableDefinition::new("generations");
pub const FAILURES: TableDefinition<u64, &str> = TableDefinition::new("failures");
pub const STEPS: TableDefinition<u64, &str> = TableDefinition::new("steps");
pub const TURNS: TableDefinition<u64, &str> = TableDefinition::new("turns");
pub const CACHES: TableDefinition<u64, &str> = TableDefinition::new("caches");
pub const CHECKPOINTS: TableDefinition<u64, &str> = TableDefinition::new("checkpoints");

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
        Record::Quarantine(quarantine) => fact("quarantine", json(quarantine)),
        Record::Node { place, node_id, host } => {
            let node = PastNode { node_id: node_id.clone(), host: host.clone() };
            row(NODES, (*place).into(), json(&node))
        }
        Record::NodeGone { place } => {
            write.open_table(NODES)?.remove(u64::from(*place))?;
            Ok(())
        }
        Record::Worker(id, claim) => {
            change(write, WORKERS, claim.seat.0.into(), |stored: &mut PastSeat| stored.taken(*id, claim))
        }
        Record::Lost { seat, respawn } => {
            let lost = PastSeat { respawn: respawn.clone(), ..PastSeat::default() };
            row(WORKERS, seat.0.into(), json(&lost))
        }
        Record::Left { seat, exit_code } => {
            change(write, WORKERS, seat.0.into(), |stored: &mut PastSeat| stored.left = Some(*exit_code))
        }
        Record::Generation { generation, members } => {
            let stored = PastGeneration { members: members.clone(), ..PastGeneration::default() };
            row(GENERATIONS, generation.0, json(&stored))
        }
        Record::Started { generation, first_step, source } => {
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
        Record::Checkpoint(entry) => row(CHECKPOINTS, entry.step.0, json(entry)),
        Record::CacheTurn(decided) => {
            write.open_table(TURNS)?.retain_in(decided.first.0.., |_, _| false)?;
            row(TURNS, decided.first.0, json(decided))
        }
        Record::CacheGeneration(entry) => row(CACHES, entry.number, json(entry)),
        Record::Failure(failure) => {
            let mut failures = write.open_table(FAILURES)?;
            let last = failures.last()?.map(|(number, row)| (number.value(), row.value().to_owned()));
            let number = match last {
                // The same fault again, now that its victims are known.
                Some((number, row)) if is_same(&row, failure) => number,
                Some((number, _)) => number + 1,
                None => 0,
            };
            failures.insert(number, json(failure.as_ref()).as_str())?;
            Ok(())
        }
    }
}

/// Whether a row is of this failure, whoever suffered from it.
fn is_same(row: &str, failure: &Failure) -> bool {
    let stored = serde_json::from_str::<Failure>(row);
    stored.is_ok_and(|stored| Failure { victims: failure.victims.clone(), ..stored } == *failure)
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
