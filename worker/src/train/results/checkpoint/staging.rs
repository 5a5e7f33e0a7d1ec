//! A checkpoint on its way: its parts are written out of sight, brought to the disk, and appear together by
//! one rename.

use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
};

use super::{Checkpoint, CheckpointError, FileEntry, Manifest, io_error, remove};
use coxswain_nn::pulse;
use coxswain_proto::{checkpoint::MANIFEST, directory};

/// A checkpoint being written.
#[derive(Clone, Debug)]
pub struct Staging {
    path: PathBuf,
    target: PathBuf,
}

impl Staging {
    /// In `path`, to appear as `target`.
    pub(super) fn new(path: PathBuf, target: PathBuf) -> Self {
        Self { path, target }
    }

    /// Where the parts are.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

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

    /// Describes every part, writes the manifest, and makes the checkpoint visible by one rename. Rank 0
    /// only, after all parts: those that `wanted` names must be there, or nothing is published.
    pub fn publish(&self, mut manifest: Manifest, wanted: &[String]) -> Result<Checkpoint, CheckpointError> {
        for entry in fs::read_dir(&self.path).map_err(io_error("read", &self.path))? {
            let path = entry.map_err(io_error("read", &self.path))?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            manifest.files.insert(name, FileEntry::describe(&path).map_err(io_error("read", &path))?);
        }
        if let Some(missing) = wanted.iter().find(|name| !manifest.files.contains_key(*name)) {
            return Err(CheckpointError::Foreign {
                path: self.file(missing),
                detail:
                    "a rank has written it, but it is missing here; do all ranks see the same run.output_dir?"
                        .into(),
            });
        }
        let path = self.file(MANIFEST);
        let text = serde_json::to_vec_pretty(&manifest).expect("a manifest has only string keys");
        fs::write(&path, text).map_err(io_error("write", &path))?;
        self.sync(MANIFEST)?;
        sync_dir(&self.path)?;
        take_place(&self.path, &self.target).map_err(io_error("publish", &self.target))?;
        if let Some(root) = self.target.parent() {
            sync_dir(root)?;
        }
        Ok(Checkpoint { path: self.target.clone(), manifest })
    }

    /// Removes everything written so far. What cannot be removed now is removed by the next attempt.
    pub fn abandon(&self) {
        remove::remove_hidden(&self.path);
    }
}

/// The rename that makes a directory visible. Where another one is (a checkpoint of the same step, after a
/// rollback over it), the two change places, so that there is one at every moment; where the file system
/// cannot do that, there is none between two renames.
pub(in crate::train) fn take_place(staged: &Path, target: &Path) -> io::Result<()> {
    if !target.exists() {
        return fs::rename(staged, target);
    }
    match remove::exchange(staged, target) {
        Ok(()) => {
            remove::remove_hidden(staged);
            Ok(())
        }
        Err(error) => {
            tracing::debug!(%error, "the file system cannot exchange directories");
            let aside = remove::hide(target)?;
            let moved = fs::rename(staged, target);
            aside.iter().for_each(|old| remove::remove_hidden(old));
            moved
        }
    }
}

fn sync_dir(path: &Path) -> Result<(), CheckpointError> {
    directory::sync(path).map_err(io_error("write", path))
}
