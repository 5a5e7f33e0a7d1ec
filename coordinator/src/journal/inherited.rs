//! The journal of a coordinator whose machine is gone becomes a file of its successor's own.
//!
//! The old file may still be open on a machine that is only cut off, and a server of files may keep the lock
//! of a dead client for a minute and more. The successor reads a copy, finds it whole, and puts it in the
//! place of the old file: what is written to that one from then on is seen by nobody.

use std::{fs, io, path::Path, thread, time::Duration};

use super::{JournalError, copies::FILE, durable::open_whole};

/// How often a copy is made that turns out torn: a predecessor that lives writes at most one more record.
const TRIES: u32 = 10;
/// Between two of them.
const PAUSE: Duration = Duration::from_millis(100);

/// Takes over the journal in a state directory, if there is one.
pub fn inherit(directory: &Path) -> Result<(), JournalError> {
    let failed = |error: io::Error| JournalError::Store {
        action: "take over",
        directory: directory.to_path_buf(),
        reason: error.to_string(),
    };
    let (old, copies) = (directory.join(FILE), directory.join("inherited"));
    if !old.try_exists().map_err(failed)? {
        return Ok(());
    }
    fs::create_dir_all(&copies).map_err(failed)?;
    let copy = copies.join(FILE);
    for tried in 1.. {
        fs::copy(&old, &copy).map_err(failed)?;
        match open_whole(&copies) {
            Ok(_) => break,
            Err(error) if tried == TRIES => return Err(error),
            Err(_) => thread::sleep(PAUSE),
        }
    }
    fs::File::open(&copy).and_then(|file| file.sync_all()).map_err(failed)?;
    fs::rename(&copy, &old).map_err(failed)?;
    fs::remove_dir_all(&copies).map_err(failed)
}

#[cfg(test)]
mod tests {
    use coxswain_proto::run_spec::RunSpec;

    use super::*;
    use crate::journal::{Durable, Journal, Life};

    fn spec() -> RunSpec {
        serde_json::from_value(serde_json::json!({
            "run": {"name": "quick", "output_dir": "out", "seed": 7},
            "model": {"path": "models/tiny"},
            "data": {"path": "data/tiny", "cameras": ["front"]},
            "train": {"steps": 100, "global_batch": 8, "micro_batch": 2},
        }))
        .expect("the specification is complete")
    }

    fn open(directory: &Path) -> Result<(Durable, u32), JournalError> {
        let opened = Durable::open(directory, &spec(), Some("run"), "fresh", Life::Restarted);
        opened.map(|(journal, _, remembered)| (journal, remembered.lives))
    }

    #[test]
    fn a_successor_goes_on_from_the_journal_that_another_machine_still_has_open() {
        let dir = tempfile::tempdir().unwrap();
        inherit(dir.path()).unwrap();
        let (mut predecessor, lives) = open(dir.path()).unwrap();
        assert_eq!(lives, 0);
        assert!(matches!(open(dir.path()).map(drop), Err(JournalError::InUse { .. })));
        inherit(dir.path()).unwrap();
        let (_successor, lives) = open(dir.path()).unwrap();
        assert_eq!(lives, 1, "it knows of the one before");
        predecessor.append(&[]).unwrap();
        assert!(!dir.path().join("inherited").exists());
    }

    #[test]
    fn a_journal_that_is_damaged_stays_where_it_is() {
        let dir = tempfile::tempdir().unwrap();
        drop(open(dir.path()).unwrap());
        fs::write(dir.path().join(FILE), b"no journal").unwrap();
        inherit(dir.path()).unwrap_err();
        assert_eq!(fs::read(dir.path().join(FILE)).unwrap(), b"no journal");
    }
}
