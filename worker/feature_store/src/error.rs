//! What can go wrong with a store, as values: which file, what was found, what to do. None of it needs to end
//! a training run, once the store is open; and a store that may only be read opens.

use std::{
    io,
    path::{Path, PathBuf},
};

/// Why the store cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The file system refused.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was tried: `write`, `publish`, ...
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// The system's words.
        source: io::Error,
    },
    /// No namespace is left on the device.
    #[error(
        "cannot write {}: {source}; no more features are stored, and training continues; free space there, set cache.budget, or move cache.dir",
        path.display()
    )]
    Full {
        /// The file being written.
        path: PathBuf,
        /// The system's words.
        source: io::Error,
    },
    /// The store has as many bytes as it may have, all of them in use.
    #[error(
        "{}: holds {used} bytes, and cache.budget is {budget}; every namespace is in use, so none can be evicted and no more features are stored; raise cache.budget",
        dir.display()
    )]
    OverBudget {
        /// The store.
        dir: PathBuf,
        /// What it holds.
        used: u64,
        /// What it may hold.
        budget: u64,
    },
    /// Written by a newer version of this program.
    #[error(
        "{}: written in format {found}, but this version reads up to {known}; use the newer version, or another cache.dir",
        path.display()
    )]
    Newer {
        /// The file that says so.
        path: PathBuf,
        /// The format found.
        found: u64,
        /// The newest format known here.
        known: u32,
    },
    /// A file is not what its name promises, or does not belong here.
    #[error("{}: {detail}", path.display())]
    Foreign {
        /// Which file or directory.
        path: PathBuf,
        /// What is wrong, and what to do.
        detail: String,
    },
    /// Bytes have changed since they were written.
    #[error(transparent)]
    Damaged(#[from] DamagedRecord),
}

/// A shard or a record whose bytes are not those that were written. Counts as a miss.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}: {}{detail}; its features are computed again when needed", path.display(), record.map(|r| format!("record {r}: ")).unwrap_or_default())]
pub struct DamagedRecord {
    /// The shard.
    pub path: PathBuf,
    /// Which record of it; none if the shard as a whole cannot be used.
    pub record: Option<usize>,
    /// What was expected and what was found.
    pub detail: String,
}

impl StoreError {
    pub(super) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_path_buf();
        move |source| match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge => {
                Self::Full { path, source }
            }
            _ => Self::Io { action, path, source },
        }
    }

    /// What it is about: failures of one kind in one namespace are alike, whatever the unique names of files.
    pub fn topic(&self) -> String {
        let namespace = |path: &Path| path.parent().unwrap_or(path).display().to_string();
        match self {
            Self::Io { action, path, source } => {
                format!("{action} in {}: {}", namespace(path), source.kind())
            }
            Self::Full { path, .. } => format!("full: {}", namespace(path)),
            Self::OverBudget { dir, .. } => format!("over budget: {}", dir.display()),
            Self::Newer { .. } | Self::Foreign { .. } | Self::Damaged(_) => self.to_string(),
        }
    }

    /// Whether what was looked for is not there: it was evicted or removed meanwhile.
    pub(super) fn is_gone(&self) -> bool {
        matches!(self, Self::Io { source, .. } if source.kind() == io::ErrorKind::NotFound)
    }

    /// `found`, or nothing in the place of what is gone.
    pub(super) fn unless_gone<V: Default>(found: Result<V, Self>) -> Result<V, Self> {
        match found {
            Err(error) if error.is_gone() => Ok(V::default()),
            found => found,
        }
    }

    /// Whether further attempts to store something would fail as well, until there is room again.
    pub fn is_full(&self) -> bool {
        matches!(self, Self::Full { .. } | Self::OverBudget { .. })
    }
}

impl DamagedRecord {
    pub(super) fn shard(path: &Path, detail: impl Into<String>) -> Self {
        Self { path: path.to_path_buf(), record: None, detail: detail.into() }
    }

    pub(super) fn record(path: &Path, record: usize, detail: impl Into<String>) -> Self {
        Self { path: path.to_path_buf(), record: Some(record), detail: detail.into() }
    }
}
