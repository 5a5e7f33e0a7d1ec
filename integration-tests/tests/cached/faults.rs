//! Stores that are damaged, full or gone: training goes on with the same bits.

use std::{
    fs::{self, OpenOptions},
    os::unix::fs::FileExt,
    path::Path,
};

use coxswain_proto::run_spec::RunSpec;

use super::{EPOCH, Run, SAMPLES, UPPER_LAYERS, outcome, parts, solo, spec, trainer, use_of, watched};

fn exact(output: &Path, store: &Path, more: &[&str]) -> RunSpec {
    let (dir, steps) = (format!("cache.dir={}", store.display()), format!("train.steps={}", 2 * EPOCH));
    spec(output, &[&["cache.mode=exact", &dir, &steps, UPPER_LAYERS], more].concat())
}

fn off(output: &Path) -> Run {
    solo(&spec(output, &[&format!("train.steps={}", 2 * EPOCH), UPPER_LAYERS]))
}

/// Inverts the bits of some bytes in the middle of a file, in place.
fn garble(path: &Path) {
    let file = OpenOptions::new().read(true).write(true).open(path).expect("it is there");
    let at = file.metadata().expect("it has a length").len() / 2;
    let mut bytes = [0; 64];
    file.read_exact_at(&mut bytes, at).expect("long enough");
    file.write_all_at(&bytes.map(|byte| !byte), at).expect("writable");
}

#[test]
fn a_garbled_part_costs_what_was_garbled_and_is_named() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let store = dir.path().join("store");
    let off = off(&dir.path().join("off"));
    solo(&exact(&dir.path().join("cold"), &store, &[]));
    let [part] = &parts(&store)[..] else { panic!("one epoch is one part") };
    garble(part);
    let again = solo(&exact(&dir.path().join("again"), &store, &[]));
    off.assert_same(&again);
    let (hits, misses) = again.used();
    assert!((1..=2).contains(&misses), "64 bytes lie in at most two records; {misses} were computed again");
    assert_eq!(hits + misses, 2 * SAMPLES);
    let name = part.file_name().expect("a file").to_str().expect("ASCII");
    assert_eq!(again.notes_with(name), misses as usize, "{:?}", again.notes);
    let third = solo(&exact(&dir.path().join("third"), &store, &[]));
    assert_eq!(third.used().1, 0, "what was computed again is stored again");
    off.assert_same(&third);
}

#[test]
fn a_truncated_part_is_computed_again() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let store = dir.path().join("store");
    let cold = solo(&exact(&dir.path().join("cold"), &store, &[]));
    let [part] = &parts(&store)[..] else { panic!("one epoch is one part") };
    let length = fs::metadata(part).expect("it is there").len();
    OpenOptions::new().write(true).open(part).expect("writable").set_len(length / 2).expect("shorter");
    let again = solo(&exact(&dir.path().join("again"), &store, &[]));
    cold.assert_same(&again);
    assert_eq!(again.used(), (SAMPLES, SAMPLES));
}

#[test]
fn parts_that_are_garbled_or_deleted_during_a_run_do_not_harm_it() {
    for (what, harm) in
        [("garbled", garble as fn(&Path)), ("deleted", |part| fs::remove_file(part).expect("there"))]
    {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let store = dir.path().join("store");
        let cold = solo(&exact(&dir.path().join("cold"), &store, &[]));
        let at = store.clone();
        let run = watched(
            &exact(&dir.path().join("again"), &store, &[]),
            0,
            Box::new(move |step| {
                if step.0 == 2 {
                    parts(&at).iter().for_each(|part| harm(part));
                }
            }),
        );
        cold.assert_same(&run);
        assert_eq!(run.used().0 + run.used().1, 2 * SAMPLES, "{what}");
    }
}

#[test]
fn a_store_that_is_deleted_during_a_run_does_not_harm_it() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let off = off(&dir.path().join("off"));
    let store = dir.path().join("store");
    let gone = store.clone();
    let run = watched(
        &exact(&dir.path().join("on"), &store, &[]),
        0,
        Box::new(move |step| {
            if step.0 == 1 && gone.exists() {
                fs::remove_dir_all(&gone).expect("ours");
            }
        }),
    );
    off.assert_same(&run);
    assert!(!run.notes.is_empty());
}

#[test]
fn a_budget_that_is_too_small_stops_storing_and_is_told_once() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let off = off(&dir.path().join("off"));
    let store = dir.path().join("store");
    let whole = solo(&exact(&dir.path().join("whole"), &store, &[]));
    let half = format!("cache.budget={}", whole.cache().bytes / 2);
    let run = solo(&exact(&dir.path().join("half"), &dir.path().join("other"), &[&half]));
    off.assert_same(&run);
    assert_eq!(run.notes_with("cache.budget"), 1, "{:?}", run.notes);
    let (hits, misses) = use_of(&run, EPOCH..2 * EPOCH);
    assert!(hits > 0 && misses > 0, "half of the samples are there: {hits} hits, {misses} misses");
}

#[test]
fn a_part_without_its_end_is_never_served() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let store = dir.path().join("store");
    let cold = solo(&exact(&dir.path().join("cold"), &store, &[]));
    let [part] = &parts(&store)[..] else { panic!("one epoch is one part") };
    // As a killed writer leaves it.
    fs::rename(part, part.with_file_name("open-left-behind.tmp")).expect("renamed");
    let again = solo(&exact(&dir.path().join("again"), &store, &[]));
    cold.assert_same(&again);
    assert_eq!(again.used(), (SAMPLES, SAMPLES));
}

#[test]
fn a_store_of_a_newer_version_is_refused() {
    use coxswain_worker::trainer::{FailureKind, TrainerOutcome};
    let dir = tempfile::tempdir().expect("a temporary directory");
    let store = dir.path().join("store");
    fs::create_dir(&store).expect("new");
    fs::write(store.join("store.json"), r#"{"format": 999, "what": "of tomorrow"}"#).expect("written");
    let spec = exact(&dir.path().join("run"), &store, &[]);
    let outcome = outcome(&mut trainer(None), &spec, 0, |link, _| Box::new(link));
    let TrainerOutcome::Failed(failure) = outcome else { panic!("refused") };
    assert_eq!(failure.kind, FailureKind::BadInput);
    assert!(failure.message.contains("999") && failure.message.contains("cache.dir"), "{}", failure.message);
}
