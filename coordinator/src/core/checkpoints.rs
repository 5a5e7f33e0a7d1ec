//! The checkpoint ledger: what is on disk, what is being written, what was given up.

use std::collections::{BTreeMap, BTreeSet};

use coxswain_proto::ids::{Bytes, Seat, Step};
use serde::{Deserialize, Serialize};

use super::event::{CheckpointReport, CheckpointState};

/// Checkpoints of a run, by step.
#[derive(Clone, Debug, Default)]
pub struct Checkpoints {
    entries: BTreeMap<Step, Progress>,
}

#[derive(Clone, Debug, Default)]
struct Progress {
    complete: Option<CheckpointEntry>,
    failed: bool,
    parts: BTreeSet<Seat>,
    bytes: Bytes,
    path: String,
}

/// One checkpoint as it is shown and remembered.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckpointEntry {
    /// At which step training resumes from it.
    pub step: Step,
    /// Relative to the output directory.
    pub path: String,
    /// Of the whole, or of the parts so far.
    pub bytes: Bytes,
    /// How far it is.
    pub state: EntryState,
}

/// How far a checkpoint is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum EntryState {
    /// Some ranks' parts are on disk.
    Writing,
    /// It can be resumed from.
    Complete,
    /// It was given up.
    Failed,
}

impl Checkpoints {
    /// What was found on disk when the coordinator started.
    pub fn found(entries: impl IntoIterator<Item = CheckpointEntry>) -> Self {
        let entries = entries
            .into_iter()
            .map(|entry| (entry.step, Progress { complete: Some(entry), ..Progress::default() }))
            .collect();
        Self { entries }
    }

    /// Takes a report; the entry when it is news for people (complete or failed, once each).
    pub fn take(&mut self, seat: Seat, report: CheckpointReport) -> Option<CheckpointEntry> {
        let progress = self.entries.entry(report.step).or_default();
        match report.state {
            CheckpointState::PartWritten => {
                if progress.complete.is_none() && progress.parts.insert(seat) {
                    progress.bytes.0 += report.bytes.0;
                    progress.path = report.path;
                    progress.failed = false;
                }
                None
            }
            CheckpointState::Complete => {
                let entry = CheckpointEntry {
                    step: report.step,
                    path: report.path,
                    bytes: report.bytes,
                    state: EntryState::Complete,
                };
                let news = progress.complete.as_ref() != Some(&entry);
                progress.complete = Some(entry.clone());
                news.then_some(entry)
            }
            CheckpointState::Failed => {
                if progress.failed || progress.complete.is_some() {
                    return None;
                }
                progress.failed = true;
                progress.path = report.path;
                Some(progress.entry(report.step))
            }
        }
    }

    /// The step of the newest one that can be resumed from; 0 without one.
    pub fn newest_complete(&self) -> Step {
        let complete = self.entries.iter().rev().find(|(_, progress)| progress.complete.is_some());
        complete.map_or(Step(0), |(step, _)| *step)
    }

    /// Whether one of this step can be resumed from.
    pub fn has(&self, step: Step) -> bool {
        self.entries.get(&step).is_some_and(|progress| progress.complete.is_some())
    }

    /// The newest `limit` checkpoints, in step order.
    pub fn newest(&self, limit: usize) -> Vec<CheckpointEntry> {
        let mut newest: Vec<_> =
            self.entries.iter().rev().take(limit).map(|(step, progress)| progress.entry(*step)).collect();
        newest.reverse();
        newest
    }
}

impl Progress {
    fn entry(&self, step: Step) -> CheckpointEntry {
        self.complete.clone().unwrap_or_else(|| CheckpointEntry {
            step,
            path: self.path.clone(),
            bytes: self.bytes,
            state: if self.failed { EntryState::Failed } else { EntryState::Writing },
        })
    }
}
