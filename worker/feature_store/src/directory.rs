//! What lies in a store's directory, within a budget of bytes.
//!
//! The budget is kept when a shard is begun: namespaces that no living process has open are removed by one
//! process at a time, the one unused for longest first, until a shard fits; if none is left, what remains of
//! the budget is the shard's allowance. Writers that begin at the same moment do not see each other's, so the
//! store may exceed its budget by at most a shard for each writer.

use std::{
    fs,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use super::{error::StoreError, shard::SHARD_BYTES, usage};
use coxswain_nn::pulse;

/// A store's directory.
#[derive(Clone, Debug)]
pub(super) struct Directory {
    /// Where it is.
    pub path: PathBuf,
    /// Most bytes of all files together.
    pub budget: Option<u64>,
}

impl Directory {
    /// Where digests of files are remembered.
    pub fn keys(&self) -> PathBuf {
        self.path.join("keys")
    }

    /// Directories of all namespaces.
    pub fn namespace_dirs(&self) -> Result<Vec<PathBuf>, StoreError> {
        let is_key = |name: &str| name.len() == 32 && name.bytes().all(|byte| byte.is_ascii_hexdigit());
        let mut dirs = entries(&self.path, is_key)?;
        dirs.retain(|path| path.is_dir());
        dirs.sort_unstable();
        Ok(dirs)
    }

    /// Bytes of all files of the store.
    pub fn bytes(&self) -> Result<u64, StoreError> {
        let mut total = files_below(&self.keys());
        for dir in self.namespace_dirs()?.into_iter().chain(self.evicted()?) {
            total += files_below(&dir);
        }
        Ok(total)
    }

    /// What evictions that were broken off have left, and what others remove at this moment.
    pub fn evicted(&self) -> Result<Vec<PathBuf>, StoreError> {
        entries(&self.path, |name| name.starts_with(usage::TRASH))
    }

    /// Makes room for a shard of the namespace in `keep`; returns the bytes that the shard may take.
    pub fn make_room(&self, keep: &Path) -> Result<u64, StoreError> {
        let Some(budget) = self.budget else { return Ok(u64::MAX) };
        for left in self.evicted()? {
            pulse::beat();
            if let Err(error) = usage::clear(&left) {
                tracing::warn!(%error, "cannot remove the rest of an evicted cache namespace");
            }
        }
        let mut used = self.bytes()?;
        // A whole shard, unless that were most of a small budget.
        let reserve = SHARD_BYTES.min(budget / 8);
        let too_much = |used: u64| used.saturating_add(reserve) > budget;
        if too_much(used) {
            // Evictors that meet look like users to each other. One that cannot wait for the others goes on
            // all the same.
            let alone = usage::alone(&self.path.join(EVICTOR), Some(EVICTOR_PATIENCE));
            let _alone =
                alone.inspect_err(|error| tracing::debug!(%error, "another process evicts at the same time"));
            used = self.bytes()?;
            if too_much(used) {
                let evicted = self.evict_down_to(budget - reserve, Some(keep))?;
                used = used.saturating_sub(evicted.iter().map(|(_, bytes)| bytes).sum());
            }
        }
        match budget.saturating_sub(used) {
            0 => Err(StoreError::OverBudget { dir: self.path.clone(), used, budget }),
            allowance => Ok(allowance),
        }
    }

    /// The error of a shard that would exceed it.
    pub fn over_budget(&self) -> StoreError {
        let used = self.bytes().unwrap_or_default();
        StoreError::OverBudget { dir: self.path.clone(), used, budget: self.budget.unwrap_or(u64::MAX) }
    }

    /// Removes namespaces that are not in use, longest unused first, until at most `bytes` are left; returns
    /// which, and their bytes. One that cannot be removed stays, and the next one goes.
    pub fn evict_down_to(&self, bytes: u64, keep: Option<&Path>) -> Result<Vec<(PathBuf, u64)>, StoreError> {
        let mut evicted = Vec::new();
        let mut used = self.bytes()?;
        for (dir, size) in self.unused(keep)? {
            if used <= bytes {
                break;
            }
            pulse::beat();
            match usage::evict(&dir) {
                Ok(true) => {
                    tracing::info!(namespace = %dir.display(), bytes = size, "cache namespace evicted");
                    used = used.saturating_sub(size);
                    evicted.push((dir, size));
                }
                Ok(false) => {}
                Err(error) => tracing::warn!(%error, "a cache namespace cannot be evicted"),
            }
        }
        Ok(evicted)
    }

    /// Namespaces that no process has open, longest unused first, with their bytes.
    pub fn unused(&self, keep: Option<&Path>) -> Result<Vec<(PathBuf, u64)>, StoreError> {
        let mut found: Vec<(SystemTime, PathBuf, u64)> = Vec::new();
        for dir in self.namespace_dirs()? {
            let (last, in_use) = usage::last_use(&dir);
            if !in_use && keep != Some(&dir) {
                let size = files_below(&dir);
                found.push((last.unwrap_or(SystemTime::UNIX_EPOCH), dir, size));
            }
        }
        found.sort_unstable();
        Ok(found.into_iter().map(|(_, dir, size)| (dir, size)).collect())
    }
}

/// What is in a directory under a name that is wanted.
pub(super) fn entries(dir: &Path, wanted: impl Fn(&str) -> bool) -> Result<Vec<PathBuf>, StoreError> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).map_err(StoreError::io("read", dir))? {
        let entry = entry.map_err(StoreError::io("read", dir))?;
        if entry.file_name().to_str().is_some_and(&wanted) {
            found.push(entry.path());
        }
    }
    Ok(found)
}

/// Bytes of the files in a directory. Files that vanish meanwhile do not count.
pub(super) fn files_below(dir: &Path) -> u64 {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.metadata().ok()).filter(|m| m.is_file()).map(|m| m.len()).sum()
}

/// Held while room is made.
const EVICTOR: &str = "evict.lock";
/// Removing a large namespace takes seconds; an evictor that holds the lock for longer is stuck.
const EVICTOR_PATIENCE: Duration = Duration::from_secs(20);
