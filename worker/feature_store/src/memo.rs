//! Digests of files that were read before, so that they are not read again: by path, size, inode and times.
//!
//! A *column* is what was found in one file: one digest for files of weights that belong together, one for
//! each row for a camera of a data file. It holds as long as the file's stamp is the same. A memo that is
//! missing or damaged, or has no room on the disk, costs reading the files again.
//!
//! Columns are shared, never copied: what is in use of a memo is in memory once. How they lie on disk is
//! `memo_file`'s.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    sync::Arc,
};

use super::{
    digest::Digest,
    error::StoreError,
    memo_file::{self, Columns},
    stamp::Stamp,
    store::Store,
    usage,
};

/// Remembered digests. One process at a time has a memo open; others wait, and find what it has read. In a
/// store that cannot be written, or is full, nothing new is remembered, and nothing is waited for.
pub struct Memo {
    path: PathBuf,
    columns: Columns,
    changed: bool,
    /// None where nothing can be written.
    lock: Option<File>,
}

impl Memo {
    /// Opens the memo `name` of a store; waits until no other process has it open.
    pub fn open(store: &Store, name: &str) -> Result<Self, StoreError> {
        let dir = store.keys_dir();
        let lock = match lock(&dir, name) {
            Ok(file) => Some(file),
            Err(StoreError::Io { source, .. }) if usage::is_denied(&source) => None,
            Err(error @ StoreError::Full { .. }) => {
                tracing::warn!(%error, "cannot save file digests; the files are read in full at the next start");
                None
            }
            Err(error) => return Err(error),
        };
        let path = dir.join(format!("{name}.memo"));
        let columns = memo_file::read(&path)?;
        Ok(Self { path, columns, changed: false, lock })
    }

    /// What was found in `file` under the name `what`, if the file has not changed since.
    pub fn get(&self, file: &Path, what: &str) -> Option<Arc<[Digest]>> {
        let (stamp, digests) = self.columns.get(&(file.to_path_buf(), what.to_owned()))?;
        (Stamp::of(file).ok()? == *stamp).then(|| digests.clone())
    }

    /// Remembers what was found in `file`; `stamp` was taken before reading it.
    pub fn put(&mut self, file: &Path, what: &str, stamp: Stamp, digests: Arc<[Digest]>) {
        if stamp.has_settled() {
            self.columns.insert((file.to_path_buf(), what.to_owned()), (stamp, digests));
            self.changed = true;
        }
    }

    /// Writes what is new to disk, without files that are gone.
    pub fn save(mut self) -> Result<(), StoreError> {
        if !self.changed || self.lock.is_none() {
            return Ok(());
        }
        self.columns.retain(|(file, _), _| file.exists());
        memo_file::write(&self.path, &self.columns)
    }
}

/// Waits until no other process has the memo `name` open: one that has it reads what is wanted here, too.
fn lock(dir: &Path, name: &str) -> Result<File, StoreError> {
    fs::create_dir_all(dir).map_err(StoreError::io("create", dir))?;
    usage::alone(&dir.join(format!("{name}.lock")), None)
}

impl Store {
    /// What `read` finds in `files` together, read only if one of them has changed since it was last asked
    /// for under this name. Other processes that ask for it meanwhile wait, and find it.
    pub fn digest_of<'a, E: From<StoreError>>(
        &self,
        files: impl Iterator<Item = &'a Path>,
        name: &str,
        read: impl FnOnce() -> Result<Digest, E>,
    ) -> Result<Digest, E> {
        let mut memo = Memo::open(self, "files")?;
        let mut stamped = Vec::new();
        for file in files {
            let path = fs::canonicalize(file).map_err(StoreError::io("find", file))?;
            let stamp = Stamp::of(&path).map_err(StoreError::io("read", &path))?;
            stamped.push((path, stamp));
        }
        // Remembered with every file, so that a change of any of them is one of all.
        let mut known = stamped.iter().map(|(path, _)| memo.get(path, name));
        if let Some(Some(first)) = known.next()
            && let [digest] = *first
            && known.all(|other| other.as_ref() == Some(&first))
        {
            return Ok(digest);
        }
        let digest = read()?;
        for (path, stamp) in stamped {
            memo.put(&path, name, stamp, [digest].into());
        }
        // What cannot be remembered is read again next time.
        if let Err(error) = memo.save() {
            tracing::warn!(%error, "cannot save the digest of the weights; they are read in full at the next start");
        }
        Ok(digest)
    }
}
