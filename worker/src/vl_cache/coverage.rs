//! How much of a run's data set a space holds, as that run last knew: for people, and for the coordinator's table.

use serde::{Deserialize, Serialize};

use super::{error::StoreError, space::Space, usage};

/// Stored samples of one run's data set.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Coverage {
    /// The run.
    pub run: String,
    /// Different samples that it trains on.
    pub total: u64,
    /// How many of them are stored.
    pub stored: u64,
}

impl Coverage {
    /// Whether nothing is missing.
    pub fn is_complete(&self) -> bool {
        self.stored >= self.total
    }
}

impl Space {
    /// Notes how far this run is; nothing is written if that is known already.
    pub fn note_coverage(&self, coverage: &Coverage) -> Result<(), StoreError> {
        let name: String =
            coverage.run.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
        let path = self.dir().join(format!("{PREFIX}{name}.json"));
        let known =
            usage::read_json(&path).ok().flatten().and_then(|value| serde_json::from_value(value).ok());
        if known.as_ref() == Some(coverage) { Ok(()) } else { usage::write_json(&path, coverage) }
    }
}

/// What runs have noted about the space in `dir`. Files that are not understood are left out.
pub(super) fn read(dir: &std::path::Path) -> Vec<Coverage> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let mine = entries.filter(|e| e.file_name().to_str().is_some_and(|name| name.starts_with(PREFIX)));
    let mut all: Vec<Coverage> = mine
        .filter_map(|entry| usage::read_json(&entry.path()).ok().flatten())
        .filter_map(|value| serde_json::from_value(value).ok())
        .collect();
    all.sort_by(|a, b| a.run.cmp(&b.run));
    all
}

const PREFIX: &str = "coverage-";
