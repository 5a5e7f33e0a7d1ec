//! How much of a run's data set a namespace holds, as that run last knew: for people, and for the
//! coordinator's table.
//!
//! A note does not know samples by name, so code that removes records takes their number off every note:
//! what is called complete is.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::{error::StoreError, namespace::Namespace, usage};

/// Stored samples of one run's data set.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Coverage {
    /// The run.
    pub run: String,
    /// Different samples that it trains on.
    pub total: u64,
    /// How many of them are stored.
    pub stored: u64,
    /// Samples of whatever run that were stored then; 0 if that is not known.
    #[serde(default)]
    pub among: u64,
}

impl Coverage {
    /// Whether nothing is missing.
    pub fn is_complete(&self) -> bool {
        self.stored >= self.total
    }

    /// What is left of it for certain after some samples have gone.
    fn without(self, lost: u64) -> Self {
        Self { stored: self.stored.saturating_sub(lost), among: self.among.saturating_sub(lost), ..self }
    }
}

impl Namespace {
    /// Notes how far this run is; nothing is written if that is known already.
    pub fn note_coverage(&self, coverage: &Coverage) -> Result<(), StoreError> {
        // The characters that a run's name may have: two runs never share a note.
        let legal = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        let name: String = coverage.run.chars().map(|c| if legal(c) { c } else { '-' }).collect();
        let path = self.dir().join(format!("{PREFIX}{name}.json"));
        if read_note(&path).as_ref() == Some(coverage) { Ok(()) } else { usage::write_json(&path, coverage) }
    }
}

/// What runs have noted about the namespace in `dir`, which has so many `samples` now: fewer than a note
/// speaks of if shards have been removed. Files that are not understood are left out.
pub(super) fn read(dir: &Path, samples: u64) -> Vec<Coverage> {
    let gone = |note: &Coverage| note.among.saturating_sub(samples);
    let notes = notes(dir).into_iter().filter_map(|path| read_note(&path));
    let mut all: Vec<_> =
        notes.map(|note| (gone(&note), note)).map(|(gone, note)| note.without(gone)).collect();
    all.sort_by(|a, b| a.run.cmp(&b.run));
    all
}

/// Samples have been taken out of the namespace in `dir`: an unknown number if `lost` is none.
pub(super) fn lose(dir: &Path, lost: Option<u64>) -> Result<(), StoreError> {
    if lost == Some(0) {
        return Ok(());
    }
    for path in notes(dir) {
        StoreError::unless_gone(match lost.and_then(|lost| Some(read_note(&path)?.without(lost))) {
            Some(note) => usage::write_json(&path, &note),
            None => std::fs::remove_file(&path).map_err(StoreError::io("remove", &path)),
        })?;
    }
    Ok(())
}

fn read_note(path: &Path) -> Option<Coverage> {
    usage::read_json(path).ok().flatten().and_then(|value| serde_json::from_value(value).ok())
}

fn notes(dir: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let mine = entries.filter(|e| e.file_name().to_str().is_some_and(|name| name.starts_with(PREFIX)));
    mine.map(|entry| entry.path()).collect()
}

const PREFIX: &str = "coverage-";
