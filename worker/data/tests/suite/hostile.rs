//! Data sets whose metadata or rows are anything: refused by file, or read.

use std::{fs, path::Path};

use coxswain_data::{
    inspect,
    lerobot::{
        Catalog,
        rows::{Columns, Limits, Part, RowStore},
    },
};
use coxswain_fuzz::Target;

use crate::sets::{Layout, V21, V30};

/// Reads what a run reads before its first step, and what `cox data check` looks at.
fn look(dir: &Path) {
    let Ok(catalog) = Catalog::open(dir) else { return };
    let _ = inspect(dir);
    for index in [0, 5, u64::MAX] {
        if let Some((row, episode)) = catalog.episodes.of_sample(index) {
            let _ = catalog.episodes.sample_of_row(episode.file, row);
        }
    }
}

/// The file as it is, and what once failed of its kind.
fn samples(name: &str, path: &Path) -> Vec<Vec<u8>> {
    let known = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/hostile")).join(name);
    [fs::read(path).unwrap()].into_iter().chain(fs::read(known).ok()).collect()
}

/// Has one file of a data set be anything, while the others are sound.
fn attack(name: &'static str, layout: &Layout, file: &str) {
    let dir = layout.write();
    let path = dir.path().join(file);
    let samples = samples(name, &path);
    look(dir.path());
    // What is not the file's takes the same each time.
    Target::new(name, samples).tries(400).holds(64 << 20, 512).check(|bytes| {
        fs::write(&path, bytes).unwrap();
        look(dir.path());
    });
}

#[test]
fn hostile_information_is_refused_or_read() {
    attack("info.json", &V30, "meta/info.json");
}

#[test]
fn hostile_episodes_are_refused_or_read() {
    attack("episodes.parquet", &V30, "meta/episodes/chunk-000/file-000.parquet");
}

#[test]
fn hostile_tasks_are_refused_or_read() {
    attack("tasks.parquet", &V30, "meta/tasks.parquet");
}

#[test]
fn hostile_statistics_are_refused_or_read() {
    attack("stats.json", &V30, "meta/stats.json");
}

#[test]
fn hostile_lines_of_episodes_are_refused_or_read() {
    attack("episodes.jsonl", &V21, "meta/episodes.jsonl");
}

#[test]
fn hostile_lines_of_tasks_are_refused_or_read() {
    attack("tasks.jsonl", &V21, "meta/tasks.jsonl");
}

/// Has the file of the rows be anything, and reads these columns of it.
fn attack_rows(name: &'static str, sound: &str, columns: &Columns, part: Part) {
    let fixtures = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures"));
    let dir = V30.write();
    let path = dir.path().join("data/chunk-000/file-000.parquet");
    let catalog = Catalog::open(dir.path()).unwrap();
    let read = || {
        let store = RowStore::new(columns.clone(), Limits::default());
        let _ = store.check_file(&catalog, 0);
        [0, 7, 38].map(|row| store.block(&catalog, 0, row, part))
    };
    let samples = samples(name, &fixtures.join(sound));
    fs::write(&path, &samples[0]).unwrap();
    let sound = read().map(|block| block.unwrap());
    assert_eq!(sound[2].image(38).is_some(), part != Part::Numbers, "{name} is sound");
    // One page may be 2 GiB, whatever the file has (docs/operate/security.md).
    Target::new(name, samples).tries(400).holds(3 << 30, 512).check(|bytes| {
        fs::write(&path, bytes).unwrap();
        drop(read());
    });
}

#[test]
fn hostile_rows_of_numbers_are_refused_or_read() {
    let numbers =
        [("observation.state", 3), ("action", 2)].map(|(name, width)| (name.to_owned(), vec![width]));
    let columns = Columns { numbers: numbers.to_vec(), cameras: Vec::new() };
    attack_rows("rows.parquet", "v3.0/data/chunk-000/file-000.parquet", &columns, Part::Numbers);
}

#[test]
fn hostile_rows_of_images_are_refused_or_read() {
    let columns = Columns { numbers: Vec::new(), cameras: vec!["observation.images.top".to_owned()] };
    attack_rows("images.parquet", "images.parquet", &columns, Part::Camera(0));
}
