//! The journal of a coordinator whose machine is gone becomes a file of its successor's own.
//!
//! The old file may still be open on a machine that is only cut off, and a server of files may keep the lock
//! of a dead client for a minute and more. The successor reads a copy, finds it whole, and puts it in the
//! place of the old file: what is written to that one from then on is seen by nobody. That is done once: a
//! successor that dies later goes on from the copy, and one that dies over it begins again.
//!
//! A disk without room is waited for: workers have state that only they have.

use std::{fs, io, path::Path, thread, time::Duration};

use coxswain_proto::in_place;

use super::{JournalError, copies::FILE, disk::Location, durable::open_whole, room};

/// The directory of the copy until it is in its place.
const COPIES: &str = "inherited";

/// How often a copy is made that turns out torn: a predecessor that lives writes at most one more record.
const TRIES: u32 = 10;
/// Between two of them.
const PAUSE: Duration = Duration::from_millis(100);

/// Takes over the journal in a state directory, if there is one.
pub fn inherit(directory: &Path) -> Result<(), JournalError> {
    let (mut wait, place) = (room::Wait::default(), Location::from(directory));
    take_over(directory, copied, || wait.pause(&place))?;
    wait.is_over(&place);
    Ok(())
}

/// Whether a successor has begun to take the journal over and was lost before it had.
pub fn is_half_inherited(directory: &Path) -> bool {
    directory.join(COPIES).exists()
}

/// Copies a file to a place where none is, or no link is followed.
fn copied(old: &Path, copy: &Path) -> io::Result<()> {
    in_place::vacate(copy).and_then(|()| fs::copy(old, copy)).and_then(|_| sync(copy))
}

fn sync(path: &Path) -> io::Result<()> {
    fs::File::open(path).and_then(|file| file.sync_all())
}

/// Copies by `copied`, and calls `pause` as often as there is no room.
fn take_over(
    directory: &Path,
    copied: impl Fn(&Path, &Path) -> io::Result<()>,
    mut pause: impl FnMut(),
) -> Result<(), JournalError> {
    let failed = |error: io::Error| JournalError::Store {
        action: "take over",
        directory: directory.to_path_buf(),
        reason: error.to_string(),
    };
    let mut with_room = |make: &dyn Fn() -> io::Result<()>| loop {
        match make() {
            Err(error) if room::is_full(&error) => pause(),
            made => return made.map_err(failed),
        }
    };
    let (old, copies) = (directory.join(FILE), directory.join(COPIES));
    if !old.try_exists().map_err(failed)? {
        return Ok(());
    }
    let copy = copies.join(FILE);
    with_room(&|| fs::create_dir_all(&copies))?;
    for tried in 1.. {
        // Some file systems find only then that there is no room.
        with_room(&|| copied(&old, &copy))?;
        match open_whole(&copies.as_path().into()) {
            Ok(_) => break,
            Err(error) if tried == TRIES => return Err(error),
            Err(_) => thread::sleep(PAUSE),
        }
    }
    sync(&copy).and_then(|()| fs::rename(&copy, &old)).map_err(failed)?;
    coxswain_proto::directory::sync(directory).and_then(|()| fs::remove_dir_all(&copies)).map_err(failed)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

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
        assert!(!is_half_inherited(dir.path()));
    }

    #[test]
    fn a_disk_without_room_for_the_copy_is_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        drop(open(dir.path()).unwrap());
        let waited = Cell::new(0);
        let without_room = |old: &Path, copy: &Path| match waited.get() {
            0 => fs::copy(old, "/dev/full").map(drop),
            _ => copied(old, copy),
        };
        let make_room = || {
            assert!(is_half_inherited(dir.path()), "who comes after one that dies now begins again");
            waited.set(waited.get() + 1);
        };
        take_over(dir.path(), without_room, make_room).unwrap();
        assert_eq!(waited.get(), 1);
        assert_eq!(open(dir.path()).unwrap().1, 1, "it goes on");
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
