//! What ranks have written of their steps, read from the directories that it lies in.

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
};

use coxswain_proto::{bounded, limits::MAX_WITNESS_BYTES, witness::WitnessedStep};

/// Processes of one name, one after the other, write to one file (in a pod they have one number).
const MAX_FILE_BYTES: u64 = 16 * MAX_WITNESS_BYTES;

/// What ranks have written of their steps.
#[derive(Clone, Debug, Default)]
pub struct Testimony {
    files: Vec<PathBuf>,
    by_step: BTreeMap<u64, Vec<WitnessLine>>,
    /// Lines that cannot be read: cut off when their process was killed, or damaged.
    pub unreadable: u64,
}

/// One line, and where it is.
#[derive(Clone, Debug)]
pub struct WitnessLine {
    /// What it says.
    pub witnessed: WitnessedStep,
    file: usize,
}

impl Testimony {
    /// All files of these directories; an error names the one that cannot be read.
    pub fn gather(directories: &[PathBuf]) -> io::Result<Self> {
        let mut testimony = Self::default();
        for directory in directories {
            let mut paths = Vec::new();
            for entry in fs::read_dir(directory).map_err(|error| named(directory, &error))? {
                let entry = entry?;
                // What is no file, or a link to one, was not written by a rank.
                if entry.file_type()?.is_file() && entry.path().extension().is_some_and(|it| it == "jsonl") {
                    paths.push(entry.path());
                }
            }
            paths.sort();
            for path in paths {
                let text = bounded::read(&path, MAX_FILE_BYTES).map_err(|error| named(&path, &error))?;
                testimony.add(&path, &text);
            }
        }
        Ok(testimony)
    }

    /// The lines of one file.
    pub fn add(&mut self, path: &Path, text: &[u8]) {
        let file = self.files.len();
        self.files.push(path.to_path_buf());
        for line in text.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
            match serde_json::from_slice::<WitnessedStep>(line) {
                Ok(witnessed) => {
                    self.by_step.entry(witnessed.step).or_default().push(WitnessLine { witnessed, file })
                }
                Err(_) => self.unreadable += 1,
            }
        }
    }

    /// How many files there are.
    pub fn files(&self) -> usize {
        self.files.len()
    }

    /// Lines of a step, of whatever generation and launch.
    pub fn of_step(&self, step: u64) -> &[WitnessLine] {
        self.by_step.get(&step).map_or(&[], Vec::as_slice)
    }

    /// All lines, step by step.
    pub fn lines(&self) -> impl Iterator<Item = &WitnessLine> {
        self.by_step.values().flatten()
    }

    /// Where a line is.
    pub fn file(&self, line: &WitnessLine) -> &Path {
        &self.files[line.file]
    }
}

fn named(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}
