//! Copies of the journal that belong to checkpoints: what a run needs beside one to go on elsewhere.
//!
//! A copy is made by the thread that writes the journal, between two transactions, so it is whole. It is
//! made when every step before the checkpoint is committed; later ones that it knows of are rolled back
//! where it is gone on from, as those after any checkpoint are. There is one copy, that of the newest
//! checkpoint.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use coxswain_proto::{ids::Step, in_place};

/// The journal's name in its state directory.
pub(super) const FILE: &str = "journal.redb";
/// What a copy's name begins with; the step follows, and the ending.
const PREFIX: &str = "journal-at-";
const ENDING: &str = ".redb";

/// Makes the copy for a checkpoint, in the place of earlier ones.
pub(super) fn make(directory: &Path, checkpoint: Step) -> io::Result<()> {
    let unfinished = directory.join(".journal-copy");
    in_place::vacate(&unfinished)?;
    fs::copy(directory.join(FILE), &unfinished)?;
    fs::File::open(&unfinished)?.sync_all()?;
    let copy = directory.join(format!("{PREFIX}{:08}{ENDING}", checkpoint.0));
    fs::rename(&unfinished, &copy)?;
    // Before the one of the checkpoint before goes.
    coxswain_proto::directory::sync(directory)?;
    for old in fs::read_dir(directory)?.flatten().map(|entry| entry.path()) {
        if step_of(&old).is_some() && old != copy {
            fs::remove_file(old)?;
        }
    }
    Ok(())
}

/// The newest copy in a state directory, and the step of its checkpoint.
pub fn newest(directory: &Path) -> Option<(Step, PathBuf)> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries.filter_map(|entry| Some((step_of(&entry.path())?, entry.path()))).max()
}

/// The journal itself, once nobody writes it any more.
pub fn original(directory: &Path) -> PathBuf {
    directory.join(FILE)
}

/// Renames a journal that cannot be read, so that the next coordinator begins a new one; returns its new
/// name.
pub(crate) fn set_aside(directory: &Path) -> io::Result<PathBuf> {
    let places = (1u32..).map(|number| directory.join(format!("{FILE}.damaged-{number}")));
    let free =
        places.into_iter().find(|place| !place.exists()).expect("a directory holds fewer than 2^32 others");
    fs::rename(original(directory), &free)?;
    coxswain_proto::directory::sync(directory)?;
    Ok(free)
}

fn step_of(path: &Path) -> Option<Step> {
    let name = path.file_name()?.to_str()?;
    name.strip_prefix(PREFIX)?.strip_suffix(ENDING)?.parse().ok().map(Step)
}

#[cfg(test)]
mod tests {
    use coxswain_proto::run_spec::RunSpec;

    use super::*;
    use crate::journal::{Durable, Journal, Life, durable::open_whole};

    fn spec(bucket: Option<&str>) -> RunSpec {
        serde_json::from_value(serde_json::json!({
            "run": {"name": "quick", "output_dir": "out", "seed": 7, "bucket": bucket},
            "model": {"path": "models/tiny"},
            "data": {"path": "data/tiny", "cameras": ["front"]},
            "train": {"steps": 100, "global_batch": 8, "micro_batch": 2},
        }))
        .expect("the specification is complete")
    }

    fn open(directory: &Path, bucket: Option<&str>) -> Durable {
        Durable::open(directory, &spec(bucket), Some("run"), "fresh", Life::Again).unwrap().0
    }

    #[test]
    fn a_copy_is_a_journal_of_its_own_while_the_other_one_is_open() {
        let [dir, elsewhere] = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let journal = open(dir.path(), Some("s3://runs/quick"));
        assert_eq!(newest(dir.path()), None);
        for step in [4, 12, 8] {
            journal.copy_for(Step(step)).unwrap();
            let (of, copy) = newest(dir.path()).unwrap();
            assert_eq!(of, Step(step), "the last one, and no other");
            fs::copy(copy, original(elsewhere.path())).unwrap();
            let (_, contents) = open_whole(&elsewhere.path().into()).unwrap();
            assert_eq!((contents.identity.unwrap().run_id.as_str(), contents.lives), ("run", 1));
        }
    }

    #[test]
    fn a_run_without_a_bucket_leaves_no_copies() {
        let dir = tempfile::tempdir().unwrap();
        open(dir.path(), None).copy_for(Step(4)).unwrap();
        assert_eq!(newest(dir.path()), None);
    }
}
