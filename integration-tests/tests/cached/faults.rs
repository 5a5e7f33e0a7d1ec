//! Stores that are damaged, full or gone: training goes on with the same bits.

use std::{
    fs::{self, OpenOptions, Permissions},
    os::unix::{
        fs::{FileExt, MetadataExt, PermissionsExt},
        process::CommandExt,
    },
    path::Path,
    process::Command,
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

/// Not a test by itself: what the next one's somebody else does with a store that he may not write.
#[test]
fn trains_on_the_store_of_somebody_else() {
    let Some(dir) = std::env::var_os("COX_TEST_READER") else { return };
    let (dir, own) = (Path::new(&dir), Path::new(&dir).join("own"));
    let store = dir.join("store");
    let run = solo(&exact(&own.join("run"), &store, &[]));
    assert_eq!(run.used(), (2 * SAMPLES, 0), "what is there is used");
    assert_eq!(run.notes_with("cannot be written"), 1, "{:?}", run.notes);
    // Of another prompt nothing is there, and nothing can be added.
    let asked = ["data.prompt='Task: {task}.'"];
    let other = solo(&exact(&own.join("other"), &store, &asked));
    assert_eq!(other.used(), (0, 2 * SAMPLES));
    assert_eq!(other.notes_with("cannot be"), 1, "one line says all: {:?}", other.notes);
    let free = solo(&exact(&own.join("free"), &own.join("store"), &asked));
    free.assert_same(&other);
}

/// Gives everything below `path` these permissions.
fn permit(path: &Path, dirs: u32, files: u32) {
    let is_dir = path.is_dir();
    if is_dir {
        fs::set_permissions(path, Permissions::from_mode(0o755)).expect("ours");
        for entry in fs::read_dir(path).expect("readable") {
            permit(&entry.expect("readable").path(), dirs, files);
        }
    }
    fs::set_permissions(path, Permissions::from_mode(if is_dir { dirs } else { files })).expect("ours");
}

#[test]
fn a_store_that_may_not_be_written_is_read() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let (store, own) = (dir.path().join("store"), dir.path().join("own"));
    solo(&exact(&dir.path().join("cold"), &store, &[]));
    let before = parts(&store);
    fs::create_dir(&own).expect("new");
    fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).expect("ours");
    fs::set_permissions(&own, Permissions::from_mode(0o777)).expect("ours");
    permit(&store, 0o555, 0o444);
    let mut child = Command::new(std::env::current_exe().expect("this program"));
    child.args(["faults::trains_on_the_store_of_somebody_else", "--exact", "--nocapture"]);
    child.env("COX_TEST_READER", dir.path()).env("HOME", &own).env("XDG_CACHE_HOME", &own);
    if fs::metadata("/proc/self").is_ok_and(|own| own.uid() == 0) {
        // To the superuser permissions mean nothing.
        child.uid(65534).gid(65534);
    }
    let output = child.output().expect("it can be started");
    permit(&store, 0o755, 0o644);
    let printed = [output.stdout, output.stderr].concat();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&printed));
    assert_eq!(parts(&store), before);
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
