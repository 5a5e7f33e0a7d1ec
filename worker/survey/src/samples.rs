//! Samples of a run, one by one: data that are no LeRobot data set, or one as a run sees it.

use std::{
    ops::ControlFlow,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
};

use coxswain_data::DataError;
use serde::Serialize;

use crate::{
    check::{Progress, in_order},
    findings::{Finding, Findings, Severity},
};

/// What is said of a sample: what it is of, in a word, and where it lies with what is there.
pub type Doubts = Vec<(&'static str, DataError)>;

/// What samples are like.
#[derive(Debug, Default, Serialize)]
pub struct SampleReport {
    /// The data.
    pub path: PathBuf,
    /// What they are, in words.
    pub about: Vec<String>,
    /// Samples that there are.
    pub samples: u64,
    /// Samples that were read.
    pub read: u64,
    /// What is wrong, errors first.
    pub findings: Vec<Finding>,
    /// Findings beyond those that are listed.
    pub left_out: u64,
}

impl SampleReport {
    /// Data at `path` of which this is wrong; no sample of it has been read.
    pub fn refused(path: &Path, errors: &[DataError]) -> Self {
        let mut findings = Findings::default();
        findings.extend(errors.iter().map(|error| Finding::of(error, root(path), "refused")));
        let (findings, left_out) = findings.into_list();
        Self { path: path.into(), findings, left_out, ..Self::default() }
    }

    /// Reads the samples of these numbers with `read`, which says what is doubtful of those that can be read.
    pub fn of(
        path: &Path,
        numbers: &[u64],
        read: &(dyn Fn(u64) -> Result<Doubts, DataError> + Sync),
        progress: Progress<'_>,
    ) -> Self {
        let (done, count) = (AtomicU64::new(0), numbers.len() as u64);
        let root = root(path);
        let look = |at: u64| {
            let number = numbers[at as usize];
            let finding = |severity, kind, error: &DataError| {
                let finding = Finding::of(error, root, kind);
                Finding { severity, row: finding.row.or(Some(number)), ..finding }
            };
            let seen = match read(number) {
                Err(error) => vec![finding(Severity::Error, "unreadable", &error)],
                Ok(doubts) => {
                    doubts.iter().map(|(kind, error)| finding(Severity::Warning, kind, error)).collect()
                }
            };
            progress(done.fetch_add(1, Ordering::Relaxed) + 1, count);
            seen
        };
        let mut findings = Findings::default();
        let take = |_, seen: Vec<Finding>| {
            findings.extend(seen);
            ControlFlow::Continue(())
        };
        // Nothing in it breaks off.
        let _: ControlFlow<()> = in_order(count, look, take);
        let (findings, left_out) = findings.into_list();
        Self { path: path.into(), read: count, findings, left_out, ..Self::default() }
    }

    /// Findings of a severity.
    pub fn count(&self, severity: Severity) -> usize {
        self.findings.iter().filter(|finding| finding.severity == severity).count()
    }
}

/// What files are named from: the folder itself, or that of a file or of a pattern.
fn root(path: &Path) -> &Path {
    if path.is_dir() { path } else { path.parent().unwrap_or(path) }
}
