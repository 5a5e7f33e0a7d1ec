//! The `checkpoints` directory: find, verify, stage, publish, prune. Knows files, not tensors.

use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
};

use super::{FileEntry, Manifest};
use crate::{memory::OutOfMemory, pulse};

/// Why a checkpoint cannot be written or read.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The file system refused.
    #[error("{action} {path}: {source}{}", remedy(source))]
    Io {
        /// What was tried: `write`, `publish`, ...
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// The system's words.
        source: io::Error,
    },
    /// A file is not what the manifest says.
    #[error("checkpoint file {path} is damaged: {detail}; remove {} to resume from an older checkpoint", path.parent().unwrap_or(path).display())]
    Damaged {
        /// Which file.
        path: PathBuf,
        /// How.
        detail: String,
    },
    /// The checkpoint belongs to something else.
    #[error("checkpoint {path}: {detail}")]
    Foreign {
        /// Which.
        path: PathBuf,
        /// What differs, and what to do.
        detail: String,
    },
    /// Another rank could not write its part.
    #[error(
        "checkpoint of step {step} given up: another rank could not write its part (its own log says why)"
    )]
    OtherRank {
        /// Which checkpoint.
        step: u64,
    },
    /// Memory ran out while this rank wrote its part.
    #[error("checkpoint of step {step} given up: {source}; the next one is tried as usual")]
    DoesNotFit {
        /// Which checkpoint.
        step: u64,
        /// What was wanted, and what held the rest.
        source: Box<OutOfMemory>,
    },
}

fn remedy(source: &io::Error) -> &'static str {
    match source.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            "; free space, lower train.keep_checkpoints, or move run.output_dir"
        }
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            "; choose another run.output_dir"
        }
        _ => "",
    }
}

pub(crate) fn io_error<'a>(
    action: &'static str,
    path: &'a Path,
) -> impl FnOnce(io::Error) -> CheckpointError + 'a {
    move |source| CheckpointError::Io { action, path: path.to_path_buf(), source }
}

/// The `checkpoints` directory of a run.
#[derive(Clone, Debug)]
pub struct Store {
    root: PathBuf,
}

/// A complete checkpoint.
#[derive(Clone, Debug)]
pub struct Found {
    /// Its directory.
    pub path: PathBuf,
    /// Its description.
    pub manifest: Manifest,
}

impl Store {
    /// The store below a run's output directory; nothing is created yet.
    pub fn new(output_dir: &Path) -> Self {
        Self { root: output_dir.join("checkpoints") }
    }

    /// Where the checkpoint of `step` is, or will be.
    pub fn path(&self, step: u64) -> PathBuf {
        self.root.join(format!("step-{step:08}"))
    }

    /// All complete checkpoints, oldest first. Directories without a readable manifest are not checkpoints.
    pub fn complete(&self) -> Result<Vec<Found>, CheckpointError> {
        let entries = match fs::read_dir(&self.root) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(io_error("read", &self.root)(error)),
        };
        let mut found = Vec::new();
        for entry in entries {
            let path = entry.map_err(io_error("read", &self.root))?.path();
            let is_step =
                path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with("step-"));
            if let (true, Some(manifest)) = (is_step, read_manifest(&path)) {
                found.push(Found { path, manifest });
            }
        }
        found.sort_by_key(|checkpoint| checkpoint.manifest.step);
        Ok(found)
    }

    /// The newest complete checkpoint.
    pub fn newest(&self) -> Result<Found, CheckpointError> {
        self.complete()?.pop().ok_or_else(|| CheckpointError::Foreign {
            path: self.root.clone(),
            detail: "holds no complete checkpoint; is this the output directory of a run that has saved one?"
                .into(),
        })
    }

    /// The checkpoint of exactly this step.
    pub fn open(&self, step: u64) -> Result<Found, CheckpointError> {
        let path = self.path(step);
        match read_manifest(&path) {
            Some(manifest) if manifest.format == Manifest::FORMAT => Ok(Found { path, manifest }),
            Some(manifest) => Err(CheckpointError::Foreign {
                path,
                detail: format!(
                    "format {} is unknown to this version, which reads {}",
                    manifest.format,
                    Manifest::FORMAT
                ),
            }),
            None => Err(CheckpointError::Foreign {
                path,
                detail: format!(
                    "step {step} is to be resumed, but there is no readable manifest; do all ranks see the same run.output_dir?"
                ),
            }),
        }
    }

    /// Creates the staging directory of a step, removing what a crash may have left there.
    pub fn stage(&self, step: u64) -> Result<Staging, CheckpointError> {
        let staging = self.staging(step);
        match fs::remove_dir_all(&staging.path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(io_error("clear", &staging.path)(error));
            }
            _ => {}
        }
        fs::create_dir_all(&staging.path).map_err(io_error("create", &staging.path))?;
        Ok(staging)
    }

    /// The staging directory that rank 0 has created.
    pub fn staging(&self, step: u64) -> Staging {
        Staging { path: self.root.join(format!(".tmp-step-{step:08}")), target: self.path(step) }
    }

    /// Removes all but the newest `keep` checkpoints.
    pub fn prune(&self, keep: usize) -> Result<(), CheckpointError> {
        let complete = self.complete()?;
        for old in &complete[..complete.len().saturating_sub(keep.max(1))] {
            pulse::beat();
            fs::remove_dir_all(&old.path).map_err(io_error("remove", &old.path))?;
        }
        Ok(())
    }
}

impl Found {
    /// A file of this checkpoint, after comparing its size and checksum with the manifest.
    pub fn verified(&self, name: &str) -> Result<PathBuf, CheckpointError> {
        let path = self.path.join(name);
        let damaged = |detail: String| CheckpointError::Damaged { path: path.clone(), detail };
        let expected =
            self.manifest.files.get(name).ok_or_else(|| damaged("the manifest does not list it".into()))?;
        let actual = FileEntry::of(&path).map_err(io_error("read", &path))?;
        if actual.bytes != expected.bytes {
            return Err(damaged(format!("{} bytes, the manifest says {}", actual.bytes, expected.bytes)));
        }
        if actual.blake3 != expected.blake3 {
            return Err(damaged("its BLAKE3 differs from the manifest's".into()));
        }
        Ok(path)
    }

    /// Bytes of all files.
    pub fn bytes(&self) -> u64 {
        self.manifest.files.values().map(|file| file.bytes).sum()
    }
}

/// A checkpoint being written.
#[derive(Clone, Debug)]
pub struct Staging {
    path: PathBuf,
    target: PathBuf,
}

impl Staging {
    /// Where a part goes.
    pub fn file(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Brings a written part to the disk and returns its length.
    pub fn sync(&self, name: &str) -> Result<u64, CheckpointError> {
        let path = self.file(name);
        let file = File::open(&path).map_err(io_error("open", &path))?;
        let bytes = file.metadata().map_err(io_error("read", &path))?.len();
        pulse::allow(bytes);
        file.sync_all().map_err(io_error("write", &path))?;
        pulse::beat();
        Ok(bytes)
    }

    /// Describes every part, writes the manifest, and makes the checkpoint visible by one rename. Rank 0 only, after all parts.
    pub fn publish(&self, mut manifest: Manifest) -> Result<Found, CheckpointError> {
        for entry in fs::read_dir(&self.path).map_err(io_error("read", &self.path))? {
            let path = entry.map_err(io_error("read", &self.path))?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            manifest.files.insert(name, FileEntry::of(&path).map_err(io_error("read", &path))?);
        }
        let path = self.file(Manifest::FILE);
        let text = serde_json::to_vec_pretty(&manifest).expect("a manifest has only string keys");
        fs::write(&path, text).map_err(io_error("write", &path))?;
        self.sync(Manifest::FILE)?;
        sync_dir(&self.path)?;
        // A checkpoint of the same step can only be an identical one, or one that a replaced directory left behind.
        if self.target.exists() {
            fs::remove_dir_all(&self.target).map_err(io_error("replace", &self.target))?;
        }
        fs::rename(&self.path, &self.target).map_err(io_error("publish", &self.target))?;
        if let Some(root) = self.target.parent() {
            sync_dir(root)?;
        }
        Ok(Found { path: self.target.clone(), manifest })
    }

    /// Removes everything written so far. What cannot be removed now is removed by the next attempt.
    pub fn abandon(&self) {
        let _ = fs::remove_dir_all(&self.path);
    }
}

fn sync_dir(path: &Path) -> Result<(), CheckpointError> {
    File::open(path).and_then(|dir| dir.sync_all()).map_err(io_error("write", path))
}

fn read_manifest(path: &Path) -> Option<Manifest> {
    serde_json::from_slice(&fs::read(path.join(Manifest::FILE)).ok()?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn manifest(step: u64) -> Manifest {
        Manifest {
            format: Manifest::FORMAT,
            step,
            epoch: 0,
            world_size: 1,
            spec_digest: "d".into(),
            version: "v".into(),
            dataset_fingerprint: "f".into(),
            micro_batch: 1,
            cache: None,
            turn: None,
            files: Default::default(),
        }
    }

    fn write(store: &Store, step: u64, content: &[u8]) -> Found {
        let staging = store.stage(step).expect("temporary directory is writable");
        fs::write(staging.file("part"), content).expect("temporary directory is writable");
        staging.publish(manifest(step)).expect("temporary directory is writable")
    }

    #[test]
    fn a_checkpoint_is_invisible_until_published() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::new(dir.path());
        let staging = store.stage(4).unwrap();
        fs::write(staging.file("part"), b"half").unwrap();
        assert!(store.complete().unwrap().is_empty());
        staging.publish(manifest(4)).unwrap();
        assert_eq!(store.complete().unwrap()[0].manifest.step, 4);
        assert!(store.open(4).unwrap().verified("part").is_ok());
    }

    #[test]
    fn a_flipped_bit_is_found_and_named() {
        let dir = tempfile::tempdir().unwrap();
        let found = write(&Store::new(dir.path()), 1, b"abcd");
        fs::write(found.path.join("part"), b"abce").unwrap();
        let error = found.verified("part").unwrap_err().to_string();
        assert!(error.contains("part") && error.contains("BLAKE3"), "{error}");
        fs::write(found.path.join("part"), b"abc").unwrap();
        assert!(found.verified("part").unwrap_err().to_string().contains("3 bytes"));
    }

    #[test]
    fn pruning_keeps_the_newest_and_never_the_last_one_away() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::new(dir.path());
        (1..=4).for_each(|step| drop(write(&store, step, b"x")));
        store.prune(2).unwrap();
        let steps =
            |store: &Store| store.complete().unwrap().iter().map(|c| c.manifest.step).collect::<Vec<_>>();
        assert_eq!(steps(&store), [3, 4]);
        store.prune(0).unwrap();
        assert_eq!(steps(&store), [4]);
    }

    #[test]
    fn what_a_crash_left_behind_is_cleared_by_the_next_attempt() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::new(dir.path());
        let staging = store.stage(2).unwrap();
        fs::write(staging.file("stale"), b"x").unwrap();
        let again = store.stage(2).unwrap();
        assert!(!again.file("stale").exists());
    }
}
