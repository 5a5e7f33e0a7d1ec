//! A complete checkpoint, and whether its files are what was written.

use std::path::PathBuf;

use super::{CheckpointError, FileEntry, Manifest, io_error};

/// A complete checkpoint.
#[derive(Clone, Debug)]
pub struct Checkpoint {
    /// Directory.
    pub path: PathBuf,
    /// Description.
    pub manifest: Manifest,
}

impl Checkpoint {
    /// A file of this checkpoint, after comparing its size and checksum with the manifest.
    pub fn verified(&self, name: &str) -> Result<PathBuf, CheckpointError> {
        let path = self.path.join(name);
        let damaged = |detail: String| CheckpointError::Damaged { path: path.clone(), detail };
        let expected =
            self.manifest.files.get(name).ok_or_else(|| damaged("the manifest does not list it".into()))?;
        let actual = FileEntry::describe(&path).map_err(io_error("read", &path))?;
        if actual.bytes != expected.bytes {
            return Err(damaged(format!("it has {} bytes instead of {}", actual.bytes, expected.bytes)));
        }
        if actual.blake3 != expected.blake3 {
            return Err(damaged("its BLAKE3 digest differs from the manifest's".into()));
        }
        Ok(path)
    }

    /// Bytes of all files.
    pub fn bytes(&self) -> u64 {
        self.manifest.files.values().fold(0, |sum, file| sum.saturating_add(file.bytes))
    }
}
