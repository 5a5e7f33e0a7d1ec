//! A coordinator that lies of a run is found by what its ranks have written, where its own ledger adds up.

use std::{fs, path::PathBuf};

use redb::{Database, ReadableTable, TableDefinition};
use serde_json::{Value, json};

use crate::{SHORT, support::Toy};

const STEPS: TableDefinition<u64, &str> = TableDefinition::new("steps");

/// Samples of a step, as the run file has it.
const BATCH: u64 = 64;

/// A finished run of two ranks whose journal is changed.
struct Liar {
    toy: Toy,
    journal: PathBuf,
    honest: Vec<u8>,
}

/// A step, and what becomes of its row.
type Lie<'a> = (u64, &'a dyn Fn(&mut Value));

impl Liar {
    fn new() -> Self {
        let toy = Toy::new(500);
        toy.train("run", &SHORT);
        toy.assert_audited("run", 8);
        let journal = toy.path("run/coordinator/journal.redb");
        let honest = fs::read(&journal).expect("it has ended");
        Self { toy, journal, honest }
    }

    /// The journal as it was, but for some rows of the ledger.
    fn says(&self, lies: &[Lie]) {
        fs::write(&self.journal, &self.honest).expect("it is ours");
        let database = Database::open(&self.journal).expect("it is whole");
        let write = database.begin_write().expect("it is ours");
        {
            let mut steps = write.open_table(STEPS).expect("it is there");
            for (step, lie) in lies {
                let told = steps.get(step).expect("readable").map(|row| row.value().to_owned());
                let mut row: Value = serde_json::from_str(&told.expect("committed")).expect("JSON");
                lie(&mut row);
                steps.insert(step, row.to_string().as_str()).expect("writable");
            }
        }
        write.commit().expect("written");
    }

    /// What the ranks say differs, as texts, though the ledger adds up by itself.
    fn differences(&self) -> Vec<String> {
        let alone = self.toy.cox(&["audit"]).arg(self.toy.path("run")).output().expect("cox-toy was built");
        let told = String::from_utf8_lossy(&alone.stdout).into_owned();
        assert!(alone.status.success() && told.ends_with("0 missing, 0 duplicate\n"), "{told}");
        let (status, audit) = self.toy.audit("run");
        let found = audit["against"]["differences"].as_array().unwrap_or_else(|| panic!("{audit:#}")).clone();
        assert_eq!(status.code(), Some(if found.is_empty() { 0 } else { 9 }), "{audit:#}");
        found.iter().map(|of| format!("{}: {}", of["step"], of["text"].as_str().expect("a text"))).collect()
    }
}

fn assert_found(found: &[String], what: &str) {
    assert!(found.iter().any(|text| text.contains(what)), "{what}: {found:#?}");
}

#[test]
fn nothing_is_witnessed_where_it_was_not_asked_for() {
    let toy = Toy::new(500);
    let mut command = toy.command("run", &SHORT);
    command.env_remove("COX_WITNESS");
    let (status, printed) = toy.start_of(command).finish();
    assert!(status.success(), "{printed}");
    assert!(!toy.path("run/witness").exists(), "{printed}");
}

#[test]
fn a_ledger_that_adds_up_and_is_not_what_ranks_did_is_found() {
    let liar = Liar::new();
    assert_eq!(liar.differences(), [""; 0]);

    // Two steps with each other's samples.
    let batch = |of: u64| json!({"start": of * BATCH, "end": (of + 1) * BATCH});
    liar.says(&[(2, &|row| row["positions"] = batch(3)), (3, &|row| row["positions"] = batch(2))]);
    let found = liar.differences();
    assert_found(&found, "2: ");
    assert_found(&found, "3: trained on positions");

    // A sample that was trained on is said to be quarantined.
    let hole = json!([{"start": 4 * BATCH, "end": 4 * BATCH + 1}]);
    liar.says(&[(4, &|row| row["left_out"] = hole.clone())]);
    assert_found(&liar.differences(), "4: quarantined samples: none in the rank's record");

    // A step that another membership is said to have done, and one that no rank has.
    liar.says(&[(5, &|row| row["generation"] = json!(9))]);
    assert_found(&liar.differences(), "5: committed by generation 9, but none of its ranks");
    liar.says(&[]);
    for file in fs::read_dir(liar.toy.path("run/witness")).expect("it was written") {
        let path = file.expect("readable").path();
        let text = fs::read_to_string(&path).expect("text");
        let kept: Vec<&str> = text.lines().filter(|line| !line.contains("\"step\":6,")).collect();
        fs::write(&path, kept.join("\n")).expect("it is ours");
    }
    assert_found(&liar.differences(), "6: committed by generation 1, but none of its ranks");
}
