//! Data that a user names without saying what it is: what tasks look at to tell whether it is theirs.

use std::{
    fs,
    io::{BufRead, BufReader, Read},
    path::{Path, PathBuf},
};

use coxswain_data::{
    DataError,
    shards::{Shards, names_shards},
};
use coxswain_proto::bounded;

/// Bytes of a record that is looked at.
const LONGEST: u64 = 1 << 20;
/// Samples of shards that are looked at.
pub const LOOKED_AT: u64 = 100;
/// Names listed; the rest are counted.
const LISTED: usize = 8;

/// The ending of a file's name, in lower case.
pub fn ending(path: &Path) -> String {
    path.extension().map(|ending| ending.to_string_lossy().to_lowercase()).unwrap_or_default()
}

/// A file itself; of a folder those right in it, by name.
pub fn files(place: &Path) -> Vec<PathBuf> {
    if place.is_file() {
        return vec![place.to_path_buf()];
    }
    let is_file = |path: &PathBuf| path.is_file() && !hidden(path);
    listed(place).into_iter().filter(is_file).collect()
}

/// The folders right in a folder, by name.
pub fn folders(place: &Path) -> Vec<PathBuf> {
    listed(place).into_iter().filter(|path| path.is_dir() && !hidden(path)).collect()
}

fn listed(place: &Path) -> Vec<PathBuf> {
    let mut paths: Vec<_> =
        fs::read_dir(place).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    paths.sort();
    paths
}

/// Whether it is hidden, as what macOS leaves beside each file it copies (`._a.png`).
pub fn hidden(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.to_string_lossy().starts_with('.'))
}

/// The first line of a file that is not blank; none if it cannot be read as text.
pub fn first_line(path: &Path) -> Option<String> {
    let mut reader = BufReader::new(bounded::open(path).ok()?.take(LONGEST));
    let mut line = String::new();
    while line.trim().is_empty() {
        line.clear();
        if reader.read_line(&mut line).ok()? == 0 {
            return None;
        }
    }
    Some(line.trim_start_matches('\u{feff}').to_owned())
}

/// The one of these files that is meant; refused if there are several. `what` says what they are.
pub fn the_one(place: &Path, files: &[PathBuf], what: &str) -> Option<Result<PathBuf, DataError>> {
    match files {
        [] => None,
        [one] => Some(Ok(one.clone())),
        several => {
            let names = several.iter().take(LISTED).map(|file| file.display().to_string());
            let found = format!("has {} {what}", several.len());
            let remedy = format!("name one of them: {}", names.collect::<Vec<_>>().join(", "));
            Some(Err(DataError::invalid(place, "(folder)", found, remedy)))
        }
    }
}

/// The shards at a place, and the pattern of their names: a pattern or file as it is, those of a folder if
/// all begin alike up to a number.
pub fn shards(place: &Path) -> Option<Result<(PathBuf, Shards), DataError>> {
    let pattern = match names_shards(place) {
        true => place.to_path_buf(),
        false => match folder_pattern(place)? {
            Ok(pattern) => pattern,
            Err(error) => return Some(Err(error)),
        },
    };
    Some(Shards::open(&pattern).map(|shards| (pattern, shards)))
}

fn folder_pattern(dir: &Path) -> Option<Result<PathBuf, DataError>> {
    let names = files(dir).into_iter().filter(|file| ending(file) == "tar");
    let names: Vec<String> = names.filter_map(|file| Some(file.file_stem()?.to_str()?.to_owned())).collect();
    let mut patterns: Vec<PathBuf> = names
        .iter()
        .map(|name| {
            let stem = name.trim_end_matches(|letter: char| letter.is_ascii_digit());
            dir.join(if stem.len() < name.len() {
                format!("{stem}[0-9]*.tar")
            } else {
                format!("{name}.tar")
            })
        })
        .collect();
    patterns.dedup();
    the_one(dir, &patterns, "sets of shards")
}
