//! Rows that nothing here has written: refused by table and row, or read.

use redb::{Builder, ReadableTable, TableDefinition, backends::InMemoryBackend};

use super::*;
use crate::journal::reading::Reader;

/// Tables of numbered rows; what follows them is the table of facts.
const NUMBERED: [TableDefinition<u64, &str>; 7] =
    [NODES, WORKERS, GENERATIONS, FAILURES, STEPS, CACHE_PHASES, CACHES];

/// A journal with something of everything, a row a line: its table, its key, itself.
fn rows() -> Vec<u8> {
    let directory = tempfile::tempdir().expect("a directory");
    let (mut journal, _) = open(directory.path(), Life::Again);
    journal.append(&records()).expect("a disk");
    journal.append(&[Record::Over(End::Finished(Step(60)))]).expect("a disk");
    let read = journal.store.opened().as_ref().expect("it is open").begin_read().expect("it was written");
    let mut lines = Vec::new();
    for (number, table) in NUMBERED.iter().enumerate() {
        let table = read.open_table(*table).expect("every table exists");
        let rows = table.iter().expect("it can be read").map(|row| row.expect("it can be read"));
        lines.extend(rows.map(|(key, value)| format!("{number}\t{}\t{}", key.value(), value.value())));
    }
    let facts = read.open_table(FACTS).expect("every table exists");
    let rows = facts.iter().expect("it can be read").map(|row| row.expect("it can be read"));
    lines.extend(rows.map(|(key, value)| format!("f\t{}\t{}", key.value(), value.value())));
    lines.join("\n").into_bytes()
}

/// Writes rows as they come, and reads the journal that they make.
fn read_back(text: &str) -> Result<(), JournalError> {
    let database = Builder::new().create_with_backend(InMemoryBackend::new()).expect("memory");
    let write = database.begin_write().expect("memory");
    for line in text.lines() {
        let mut parts = line.splitn(3, '\t');
        let (Some(table), Some(key), Some(value)) = (parts.next(), parts.next(), parts.next()) else {
            continue;
        };
        match table.parse().ok().and_then(|number: usize| NUMBERED.get(number)) {
            Some(table) => {
                let key = key.parse::<u64>().unwrap_or(u64::MAX);
                write.open_table(*table).expect("memory").insert(key, value).expect("memory");
            }
            None => drop(write.open_table(FACTS).expect("memory").insert(key, value).expect("memory")),
        }
    }
    write.commit().expect("memory");
    let read = database.begin_read().expect("memory");
    let reader = Reader::new(&read, Path::new("here"));
    reader.everything()?;
    reader.history().map(drop)
}

#[test]
fn hostile_rows_of_a_journal_are_refused_or_read() {
    let sound = rows();
    read_back(std::str::from_utf8(&sound).expect("text")).expect("nothing is wrong with it");
    coxswain_fuzz::Target::new("journal rows", [sound]).tries(500).holds(32 << 20, 256).check(|bytes| {
        drop(read_back(&String::from_utf8_lossy(bytes)));
    });
}
