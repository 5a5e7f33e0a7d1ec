//! Where a rank writes what it did in each step, apart from its reports. Off unless `COX_WITNESS=1`.
//!
//! One write a step, never synced: what a killed process has written stays, what a machine had not brought to
//! its disk when it lost power does not. A full disk is tried again in the next step.

use std::{
    fs::{self, File},
    io::{self, ErrorKind, Write},
    path::{Path, PathBuf},
};

use coxswain_proto::{
    in_place,
    limits::{MAX_UNWRITTEN_BYTES, MAX_WITNESS_BYTES},
    witness::{DIRECTORY, VARIABLE, WitnessedStep},
};

/// Writes what this rank did in each step.
pub(in crate::train) struct Witness {
    path: PathBuf,
    file: Option<File>,
    /// What the disk has not taken yet. A process begins with the end of a line, for another one of its name
    /// may have been killed within one.
    unwritten: Vec<u8>,
    /// Bytes that may still be added; none once it has given up.
    room: u64,
    /// Whether it was said that the disk takes nothing.
    waits: bool,
    /// Samples of the present attempt, by index.
    seen: Vec<u64>,
}

impl Witness {
    /// One for this process, if it was asked for.
    pub fn from_environment(output_dir: &Path) -> Option<Self> {
        let asked = std::env::var_os(VARIABLE).is_some_and(|value| value == "1");
        asked.then(|| Self::in_directory(&output_dir.join(DIRECTORY), MAX_WITNESS_BYTES))
    }

    fn in_directory(directory: &Path, room: u64) -> Self {
        let host = nix::unistd::gethostname().ok().and_then(|name| name.into_string().ok());
        let name = format!("{}-{}.jsonl", host.unwrap_or_default(), std::process::id());
        Self {
            path: directory.join(name),
            file: None,
            unwritten: b"\n".to_vec(),
            room,
            waits: false,
            seen: Vec::new(),
        }
    }

    /// What the attempt before has added up is gone.
    pub fn begin_attempt(&mut self) {
        self.seen.clear();
    }

    /// The gradients of these samples were added.
    pub fn see(&mut self, samples: &[u64]) {
        self.seen.extend(samples);
    }

    /// Samples of the present attempt whose gradients were added.
    pub fn seen(&self) -> &[u64] {
        &self.seen
    }

    /// Writes a line, or the last one.
    pub fn write(&mut self, mut line: WitnessedStep) {
        if self.room == 0 {
            return;
        }
        let bytes = |line: &WitnessedStep| {
            let mut bytes = serde_json::to_vec(line).expect("numbers under string keys");
            bytes.push(b'\n');
            bytes
        };
        let mut text = bytes(&line);
        // Another one may have no room behind it, and the last line is longer.
        if text.len() as u64 * 3 > self.room {
            line.full = true;
            text = bytes(&line);
            self.room = text.len() as u64;
            tracing::warn!(path = %self.path.display(), step = line.step, "this rank's witness file is full: later steps are not recorded for `cox audit --against`");
        }
        self.room -= text.len() as u64;
        self.unwritten.extend(text);
        if let Err(error) = self.flush() {
            if !self.waits {
                tracing::warn!(path = %self.path.display(), %error, "cannot write this rank's witness records now; retrying after the next step");
            }
            self.waits = true;
            if self.unwritten.len() > MAX_UNWRITTEN_BYTES {
                tracing::warn!(path = %self.path.display(), %error, "this rank records no further steps for `cox audit --against`");
                (self.unwritten, self.room) = (Vec::new(), 0);
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        let file = match &mut self.file {
            Some(file) => file,
            none => none.insert(create(&self.path)?),
        };
        while !self.unwritten.is_empty() {
            match file.write(&self.unwritten) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(written) => drop(self.unwritten.drain(..written)),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        self.waits = false;
        Ok(())
    }
}

fn create(path: &Path) -> io::Result<File> {
    let directory = path.parent().unwrap_or(path);
    fs::create_dir_all(directory)?;
    if !fs::symlink_metadata(directory)?.is_dir() {
        return Err(io::Error::new(
            ErrorKind::InvalidInput,
            "its folder is a symbolic link, which is not followed",
        ));
    }
    in_place::append(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(step: u64) -> WitnessedStep {
        WitnessedStep { run: "r".into(), step, world: 1, ..WitnessedStep::default() }
    }

    fn lines(path: &Path) -> Vec<WitnessedStep> {
        let text = fs::read_to_string(path).unwrap();
        text.lines().filter(|line| !line.is_empty()).map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    #[test]
    fn what_is_written_is_bounded_and_says_where_it_ends() {
        let dir = tempfile::tempdir().unwrap();
        let mut witness = Witness::in_directory(&dir.path().join("witness"), 1_000);
        (0..100).for_each(|step| witness.write(line(step)));
        let written = lines(&witness.path);
        assert!(fs::metadata(&witness.path).unwrap().len() <= 1_001 && written.len() > 2, "{written:?}");
        let last = written.len() - 1;
        assert!(
            written.iter().enumerate().all(|(at, line)| line.step == at as u64 && line.full == (at == last))
        );
    }

    #[test]
    fn what_cannot_be_written_now_is_written_later() {
        let dir = tempfile::tempdir().unwrap();
        // No folder can be made where a file is.
        let folder = dir.path().join("witness");
        fs::write(&folder, "").unwrap();
        let mut witness = Witness::in_directory(&folder, 10_000);
        witness.write(line(0));
        fs::remove_file(&folder).unwrap();
        witness.write(line(1));
        assert_eq!(lines(&witness.path), [line(0), line(1)]);
    }

    #[test]
    fn a_link_in_the_place_of_its_folder_is_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let elsewhere = dir.path().join("elsewhere");
        fs::create_dir(&elsewhere).unwrap();
        std::os::unix::fs::symlink(&elsewhere, dir.path().join("witness")).unwrap();
        Witness::in_directory(&dir.path().join("witness"), 10_000).write(line(0));
        assert_eq!(fs::read_dir(&elsewhere).unwrap().count(), 0);
    }
}
