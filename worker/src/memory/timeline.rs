//! A rank's memory over the steps of a run, for plotting: `memory/rank-0000.jsonl` in the run's directory,
//! one JSON object a line.
//!
//! ```text
//! {"step":12,"unix_ms":1763647000000,"micro_batch":4,"attempts":1,"in_use":23068672,
//!  "phases":{"forward":{"in_use":..,"reserved":..,"driver":..},"backward":{..},"optimizer":{..}}}
//! ```
//!
//! `in_use` is what the rank held at the step's end; `phases` holds the peaks of the phases since the line
//! before, in bytes, in the three scopes of the module. `attempts` above 1: the step ran out of memory and
//! was tried again. A run that is resumed appends, so a step that was repeated has two lines; the later one
//! counts.
//!
//! A line is written whole and at once. What the file system refuses is said once; then the timeline ends and
//! training goes on.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{self, Write},
    path::{Path, PathBuf},
};

use coxswain_proto::{
    ids::{Rank, Step},
    in_place,
};
use serde::Serialize;

use super::PhasePeak;
use crate::clock;

/// The open file; nothing once it has failed.
#[derive(Debug)]
pub(super) struct Timeline {
    rank: Rank,
    path: PathBuf,
    file: Option<File>,
}

/// One line.
#[derive(Debug, Serialize)]
pub(super) struct Line<'a> {
    pub step: u64,
    pub unix_ms: u64,
    pub micro_batch: usize,
    pub attempts: u32,
    pub in_use: u64,
    pub phases: BTreeMap<&'a str, PhasePeak>,
}

impl<'a> Line<'a> {
    pub fn new(step: Step, phases: BTreeMap<&'a str, PhasePeak>) -> Self {
        let unix_ms = clock::since_epoch().as_millis() as u64;
        Self { step: step.0, unix_ms, micro_batch: 0, attempts: 1, in_use: 0, phases }
    }
}

impl Timeline {
    /// Appends to the rank's file below the run's directory.
    pub fn append_to(run_dir: &Path, rank: Rank) -> Self {
        let path = run_dir.join("memory").join(format!("rank-{:04}.jsonl", rank.0));
        let open = || {
            fs::create_dir_all(run_dir.join("memory"))?;
            in_place::append(&path)
        };
        let file = open();
        let mut timeline = Self { rank, file: None, path: path.clone() };
        match file {
            Ok(file) => timeline.file = Some(file),
            Err(error) => timeline.give_up(&error),
        }
        timeline
    }

    /// Whose it is.
    pub fn rank(&self) -> Rank {
        self.rank
    }

    pub fn write(&mut self, line: &Line<'_>) {
        let Some(file) = &mut self.file else { return };
        let mut text = serde_json::to_vec(line).expect("numbers under string keys");
        text.push(b'\n');
        if let Err(error) = file.write_all(&text) {
            self.give_up(&error);
        }
    }

    fn give_up(&mut self, error: &io::Error) {
        tracing::warn!(path = %self.path.display(), %error, "cannot write the memory timeline; nothing more is added to it");
        self.file = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timeline_is_one_json_object_a_line_and_grows_over_resumes() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let peak = PhasePeak { in_use: 3, reserved: 4, driver: 5 };
        for step in [0, 1] {
            let mut timeline = Timeline::append_to(dir.path(), Rank(2));
            timeline.write(&Line::new(Step(step), BTreeMap::from([("forward", peak)])));
        }
        let text = fs::read_to_string(dir.path().join("memory/rank-0002.jsonl")).expect("written");
        let lines: Vec<serde_json::Value> =
            text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
        assert_eq!(lines.len(), 2);
        assert_eq!((&lines[1]["step"], &lines[1]["phases"]["forward"]["driver"]), (&1.into(), &5.into()));
    }

    #[test]
    fn a_directory_that_cannot_be_made_costs_the_timeline_only() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        fs::write(dir.path().join("memory"), b"a file").expect("writable");
        let mut timeline = Timeline::append_to(dir.path(), Rank(0));
        timeline.write(&Line::new(Step(0), BTreeMap::new()));
        assert!(timeline.file.is_none());
    }
}
