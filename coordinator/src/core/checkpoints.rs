//! The checkpoint ledger: what is on disk, and what was given up.
//!
//! It begins with what lies in the output directory when the coordinator starts, and nothing else: that a
//! checkpoint was there once does not help a worker that is told to start from it. Workers keep as many as
//! the run file says, and so does it.

use std::collections::BTreeMap;

use coxswain_proto::{
    ids::{Bytes, Step},
    limits::MAX_LISTED_CHECKPOINTS,
    report::{CheckpointState, Skip},
};

use super::event::CheckpointReport;

/// Checkpoints of a run, by step.
#[derive(Clone, Debug)]
pub struct Checkpoints {
    entries: BTreeMap<Step, CheckpointEntry>,
    /// Complete ones that workers leave on disk.
    keep: usize,
    /// Steps of which those say that were found on disk that they were left out.
    skipped: BTreeMap<Step, Skip>,
}

/// One checkpoint as it is shown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckpointEntry {
    /// At which step training resumes from it.
    pub step: Step,
    /// Relative to the output directory.
    pub path: String,
    /// Bytes of the whole checkpoint.
    pub bytes: Bytes,
    /// Whether there is one.
    pub state: CheckpointState,
}

impl Checkpoints {
    /// What was found on disk when the coordinator started, in a run that keeps so many
    /// (`train.keep_checkpoints`).
    pub fn found(entries: impl IntoIterator<Item = CheckpointEntry>, keep: usize) -> Self {
        let entries = entries.into_iter().map(|entry| (entry.step, entry)).collect();
        Self { entries, keep: keep.max(1), skipped: BTreeMap::new() }
    }

    /// Adds the steps of which these checkpoints say that they were left out.
    pub fn saying(self, skipped: BTreeMap<Step, Skip>) -> Self {
        Self { skipped, ..self }
    }

    /// Why a step was left out, if a checkpoint found on disk says that it was.
    pub fn skipped(&self, step: Step) -> Option<&Skip> {
        self.skipped.get(&step)
    }

    /// Takes a report; the entry when it is news for people (complete or failed, once each).
    pub fn apply_report(&mut self, report: CheckpointReport) -> Option<CheckpointEntry> {
        let CheckpointReport { step, state, path, bytes } = report;
        let entry = CheckpointEntry { step, path, bytes, state };
        match self.entries.get(&step) {
            Some(known) if *known == entry => return None,
            // What is on disk is not lost by a later try to write it.
            Some(known) if state == CheckpointState::Failed && known.state == CheckpointState::Complete => {
                return None;
            }
            _ => {}
        }
        self.entries.insert(step, entry.clone());
        self.forget_old();
        Some(entry)
    }

    /// All ranks went on from `step`, though there were newer ones: those were found damaged.
    pub fn gone_on_from(&mut self, step: Step) {
        self.entries.retain(|found, entry| *found <= step || entry.state != CheckpointState::Complete);
    }

    /// The step of the newest one that can be resumed from; 0 without one.
    pub fn newest_complete(&self) -> Step {
        self.complete().next_back().unwrap_or_default()
    }

    /// Whether one of this step can be resumed from.
    pub fn has(&self, step: Step) -> bool {
        self.entries.get(&step).is_some_and(|entry| entry.state == CheckpointState::Complete)
    }

    /// The newest `limit` checkpoints, in step order.
    pub fn newest(&self, limit: usize) -> Vec<CheckpointEntry> {
        let mut newest: Vec<_> = self.entries.values().rev().take(limit).cloned().collect();
        newest.reverse();
        newest
    }

    /// Steps that can be resumed from, in order.
    fn complete(&self) -> impl DoubleEndedIterator<Item = Step> {
        let complete = self.entries.values().filter(|entry| entry.state == CheckpointState::Complete);
        complete.map(|entry| entry.step)
    }

    /// Workers remove the oldest when a new one is complete; of those that were given up some are shown.
    fn forget_old(&mut self) {
        let surplus = self.complete().count().saturating_sub(self.keep);
        let pruned: Vec<_> = self.complete().take(surplus).collect();
        self.entries.retain(|step, _| !pruned.contains(step));
        let failed = self.entries.values().filter(|entry| entry.state == CheckpointState::Failed);
        let failed: Vec<_> = failed.map(|entry| entry.step).collect();
        for step in failed.iter().rev().skip(MAX_LISTED_CHECKPOINTS) {
            self.entries.remove(step);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(step: u64, state: CheckpointState) -> CheckpointReport {
        CheckpointReport {
            step: Step(step),
            state,
            path: format!("checkpoints/step-{step}"),
            bytes: Bytes(9),
        }
    }

    fn steps(checkpoints: &Checkpoints) -> Vec<u64> {
        checkpoints.newest(100).into_iter().map(|entry| entry.step.0).collect()
    }

    #[test]
    fn what_workers_have_removed_is_not_listed() {
        let mut checkpoints = Checkpoints::found([], 2);
        for step in [10, 20, 30] {
            assert!(checkpoints.apply_report(report(step, CheckpointState::Complete)).is_some());
        }
        assert_eq!(steps(&checkpoints), [20, 30]);
        assert_eq!((checkpoints.newest_complete(), checkpoints.has(Step(10))), (Step(30), false));
    }

    #[test]
    fn a_report_is_news_once_and_failures_are_bounded() {
        let mut checkpoints = Checkpoints::found([], 1);
        assert!(checkpoints.apply_report(report(5, CheckpointState::Complete)).is_some());
        assert!(checkpoints.apply_report(report(5, CheckpointState::Complete)).is_none());
        assert!(checkpoints.apply_report(report(5, CheckpointState::Failed)).is_none(), "it is there");
        for step in 6..6 + 2 * MAX_LISTED_CHECKPOINTS as u64 {
            assert!(checkpoints.apply_report(report(step, CheckpointState::Failed)).is_some());
        }
        assert_eq!(steps(&checkpoints).len(), MAX_LISTED_CHECKPOINTS + 1);
        assert_eq!(checkpoints.newest_complete(), Step(5));
        assert!(checkpoints.apply_report(report(6 + 64, CheckpointState::Complete)).is_some(), "a later try");
    }

    #[test]
    fn checkpoints_that_were_found_damaged_are_forgotten_when_a_generation_starts_before_them() {
        let mut checkpoints = Checkpoints::found([], 3);
        for step in [2, 4, 6] {
            checkpoints.apply_report(report(step, CheckpointState::Complete));
        }
        checkpoints.gone_on_from(Step(6));
        assert_eq!(checkpoints.newest_complete(), Step(6));
        checkpoints.gone_on_from(Step(2));
        assert_eq!((checkpoints.newest_complete(), steps(&checkpoints)), (Step(2), vec![2]));
        checkpoints.apply_report(report(4, CheckpointState::Complete));
        assert_eq!(checkpoints.newest_complete(), Step(4), "written again");
    }
}
