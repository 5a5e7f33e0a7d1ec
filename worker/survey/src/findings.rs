//! What was found, by place: like findings in one file are one, with their number; those of rows have a place
//! each.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    path::Path,
};

use coxswain_data::DataError;
use serde::Serialize;

/// What helps where a file is not whole.
pub const COPY_AGAIN: &str = "copy or download the file again";
/// Different findings kept; a data set with more has one cause.
const KEPT: usize = 500;

/// What a finding means for training.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Severity {
    /// Training stops, leaves samples out, or learns something else than what was recorded.
    Error,
    /// Training goes on; probably not meant so.
    Warning,
}

/// One thing that is wrong.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Finding {
    /// How bad.
    pub severity: Severity,
    /// What kind of thing, in one word or two.
    pub kind: &'static str,
    /// File, relative to the data set where it is below it.
    pub file: String,
    /// Episode, if it is of one.
    pub episode: Option<u64>,
    /// Frame of the episode, if it is of one.
    pub frame: Option<u64>,
    /// Line of a text file from 1, or sample, if it is of one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub row: Option<u64>,
    /// Feature; empty if it is of none.
    pub feature: String,
    /// What is there.
    pub found: String,
    /// What to do.
    pub remedy: String,
    /// Further ones of this kind, in this file and feature.
    pub more: u64,
}

impl Finding {
    /// An error in a file.
    pub fn error(kind: &'static str, found: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self {
            severity: Severity::Error,
            kind,
            file: String::new(),
            episode: None,
            frame: None,
            row: None,
            feature: String::new(),
            found: found.into(),
            remedy: remedy.into(),
            more: 0,
        }
    }

    /// A warning in a file.
    pub fn warning(kind: &'static str, found: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { severity: Severity::Warning, ..Self::error(kind, found, remedy) }
    }

    /// What an error of the reader says, of a data set at `root`.
    pub fn of(error: &DataError, root: &Path, kind: &'static str) -> Self {
        // Remedies stand behind the last semicolon of what the reader says.
        let told = |text: &str| {
            let (found, remedy) = text.rsplit_once("; ").unwrap_or((text, ""));
            Self::error(kind, found, remedy)
        };
        match error {
            DataError::Sample { path, episode, frame, feature, fault, .. } => {
                told(fault).file(root, path).feature(feature).episode(*episode).frame(*frame)
            }
            DataError::Invalid { path, field, found, remedy } => {
                let feature = if field == "(file)" { "" } else { field };
                Self::error(kind, found, remedy).file(root, path).feature(feature)
            }
            DataError::Parquet { path, detail } => {
                Self::error(kind, format!("cannot be read as parquet: {detail}"), COPY_AGAIN).file(root, path)
            }
            DataError::Io { path, action, source } => {
                Self::error(kind, format!("cannot {action}: {source}"), COPY_AGAIN).file(root, path)
            }
            DataError::Line { path, line, fault } => told(fault).file(root, path).row(*line),
            DataError::Remote { path, fault, .. } => told(fault).file(root, path),
            DataError::Video { path, camera, fault } => {
                told(&fault.to_string()).file(root, path).feature(camera)
            }
            other => told(&other.to_string()),
        }
    }

    /// In this file of the data set at `root`.
    pub fn file(mut self, root: &Path, path: &Path) -> Self {
        self.file = path.strip_prefix(root).unwrap_or(path).display().to_string();
        self
    }

    /// This finding, of this feature.
    pub fn feature(mut self, feature: &str) -> Self {
        self.feature = feature.to_string();
        self
    }

    /// In this line, or sample.
    pub fn row(self, row: u64) -> Self {
        Self { row: Some(row), ..self }
    }

    /// In this episode.
    pub fn episode(mut self, episode: u64) -> Self {
        self.episode = Some(episode);
        self
    }

    /// In this frame of the episode.
    pub fn frame(mut self, frame: u64) -> Self {
        self.frame = Some(frame);
        self
    }
}

/// All that was found.
#[derive(Debug, Default)]
pub struct Findings {
    by_place: BTreeMap<(String, &'static str, String, Option<u64>), Finding>,
    left_out: u64,
}

impl Findings {
    /// Takes one in.
    pub fn add(&mut self, finding: Finding) {
        let place = (finding.file.clone(), finding.kind, finding.feature.clone(), finding.row);
        let is_full = self.by_place.len() >= KEPT;
        match self.by_place.entry(place) {
            Entry::Occupied(mut first) => first.get_mut().more += 1 + finding.more,
            Entry::Vacant(_) if is_full => self.left_out += 1,
            Entry::Vacant(place) => drop(place.insert(finding)),
        }
    }

    /// Errors first, then by file; and how many were not kept.
    pub fn into_list(self) -> (Vec<Finding>, u64) {
        let mut list: Vec<_> = self.by_place.into_values().collect();
        list.sort_by_key(|finding| finding.severity);
        (list, self.left_out)
    }
}

impl Extend<Finding> for Findings {
    fn extend<I: IntoIterator<Item = Finding>>(&mut self, findings: I) {
        findings.into_iter().for_each(|finding| self.add(finding));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn like_findings_of_a_file_are_counted_and_errors_come_first() {
        let mut all = Findings::default();
        let root = Path::new("/set");
        let nan =
            |row| Finding::error("not finite", "NaN", "repair").file(root, Path::new("/set/a")).frame(row);
        all.add(Finding::warning("constant", "always 0", "leave it out").file(root, Path::new("/else")));
        all.extend([nan(3), nan(4), nan(9)]);
        let (list, left_out) = all.into_list();
        let shown: Vec<_> = list.iter().map(|one| (one.file.as_str(), one.frame, one.more)).collect();
        assert_eq!((shown, left_out), (vec![("a", Some(3), 2), ("/else", None, 0)], 0));
    }
}
