//! The store: a directory of spaces, within a budget of bytes.
//!
//! The budget is kept when a part is begun: spaces that no living process has open are removed by one process at a time, the one unused for
//! longest first, until a part fits; if none is left, what remains of the budget is the part's allowance. Writers that begin at the same moment do
//! not see each other's, so the store may exceed its budget by at most a part for each writer.
//!
//! A store that may not be written is a store that is read: of another user, or on a medium that cannot be written. One for which there is no
//! room at all is an empty one, for as long as it is open.

use std::{
    fs,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use serde_json::{Value, json};

use super::{
    digest::SpaceKey,
    error::StoreError,
    space::Space,
    space_file::{self, SpaceDescription},
    usage::{self, InUse},
    writer::PART_BYTES,
};
use coxswain_nn::pulse;

/// Version of the whole layout, `store.json` and `space.json`; a reader refuses newer ones.
pub const FORMAT: u32 = 1;

/// A directory of spaces. Cheap to clone; holds nothing open.
#[derive(Clone, Debug)]
pub struct Store {
    dir: PathBuf,
    budget: Option<u64>,
    /// Why nothing can be added.
    read_only: Option<String>,
}

impl Store {
    /// Opens the store in `dir`, or makes one. `budget` bounds its bytes.
    pub fn open(dir: &Path, budget: Option<u64>) -> Result<Self, StoreError> {
        if let Some(store) = Self::existing(dir)? {
            return Ok(Self { budget, ..store });
        }
        let read_only = match Self::make(dir) {
            Err(StoreError::Full { source, .. }) => Some(source.to_string()),
            made => made.map(|()| None)?,
        };
        Ok(Self { dir: dir.to_path_buf(), budget, read_only })
    }

    fn make(dir: &Path) -> Result<(), StoreError> {
        fs::create_dir_all(dir).map_err(StoreError::io("create", dir))?;
        let file: Value =
            json!({ "format": FORMAT, "what": "features of vision-language models, kept by coxswain" });
        usage::write_json(&dir.join(NAME), &file)
    }

    /// Opens a store that is there already; none if `dir` holds none.
    pub fn existing(dir: &Path) -> Result<Option<Self>, StoreError> {
        if dir.exists() && !dir.is_dir() {
            let detail = "is not a directory; name another cache.dir".into();
            return Err(StoreError::Foreign { path: dir.into(), detail });
        }
        let store = Self { dir: dir.to_path_buf(), budget: None, read_only: None };
        if !store.check()? {
            return Ok(None);
        }
        let read_only = usage::denies_writing(dir).map(|error| error.to_string());
        Ok(Some(Self { read_only, ..store }))
    }

    /// Whether the file that makes a directory a store is there, and of a format known here.
    fn check(&self) -> Result<bool, StoreError> {
        let path = self.dir.join(NAME);
        let Some(value) = usage::read_json(&path)? else { return Ok(false) };
        usage::check_format(&path, &value)?;
        Ok(true)
    }

    /// Its directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Why nothing can be added to it, in the system's words; none if it can be written.
    pub fn read_only(&self) -> Option<&str> {
        self.read_only.as_deref()
    }

    /// Where digests of the data set's images are remembered.
    pub fn keys_dir(&self) -> PathBuf {
        self.dir.join("keys")
    }

    /// The space of this description, made if there is none.
    pub fn space(&self, description: &SpaceDescription) -> Result<Space, StoreError> {
        let key = description.key();
        let dir = self.dir.join(key.directory());
        if description.width == 0 {
            return Err(StoreError::Foreign { path: dir, detail: "features have at least one value".into() });
        }
        let in_use = InUse::enter(&dir)?;
        match space_file::read(&dir) {
            Ok(Some((found, _))) if found == key => {}
            Ok(Some((found, _))) => {
                let detail = format!(
                    "holds space {found}, whose name begins like that of {key}; use another cache.dir"
                );
                return Err(StoreError::Foreign { path: dir, detail });
            }
            Err(error @ (StoreError::Newer { .. } | StoreError::Io { .. })) => return Err(error),
            Ok(None) => space_file::write(&dir, description)?,
            Err(error) => {
                tracing::warn!(%error, "description of a cache space written again");
                space_file::write(&dir, description)?;
            }
        }
        Space::open(self.clone(), dir, description.clone(), in_use)
    }

    /// The space with this key, as a lease names it; none if the store has none.
    pub fn find(&self, key: &SpaceKey) -> Result<Option<Space>, StoreError> {
        let dir = self.dir.join(key.directory());
        if !dir.is_dir() {
            return Ok(None);
        }
        let in_use = InUse::enter(&dir)?;
        match space_file::read(&dir)? {
            Some((found, description)) if found == *key => {
                Space::open(self.clone(), dir, description, in_use).map(Some)
            }
            _ => Ok(None),
        }
    }

    /// Directories of all spaces.
    pub(super) fn space_dirs(&self) -> Result<Vec<PathBuf>, StoreError> {
        let is_key = |name: &str| name.len() == 32 && name.bytes().all(|byte| byte.is_ascii_hexdigit());
        let mut dirs = entries(&self.dir, is_key)?;
        dirs.retain(|path| path.is_dir());
        dirs.sort_unstable();
        Ok(dirs)
    }

    /// Bytes of all files of the store.
    pub fn bytes(&self) -> Result<u64, StoreError> {
        let mut total = files_below(&self.keys_dir());
        for dir in self.space_dirs()?.into_iter().chain(self.evicted()?) {
            total += files_below(&dir);
        }
        Ok(total)
    }

    /// What evictions that were broken off have left, and what others remove at this moment.
    pub(super) fn evicted(&self) -> Result<Vec<PathBuf>, StoreError> {
        entries(&self.dir, |name| name.starts_with(usage::TRASH))
    }

    /// Makes room for a part of the space in `keep`; returns the bytes that the part may take.
    pub(super) fn make_room(&self, keep: &Path) -> Result<u64, StoreError> {
        let Some(budget) = self.budget else { return Ok(u64::MAX) };
        for left in self.evicted()? {
            pulse::beat();
            if let Err(error) = usage::clear(&left) {
                tracing::warn!(%error, "what is left of an evicted cache space stays");
            }
        }
        let mut used = self.bytes()?;
        // A whole part, unless that were most of a small budget.
        let reserve = PART_BYTES.min(budget / 8);
        let too_much = |used: u64| used.saturating_add(reserve) > budget;
        if too_much(used) {
            // Evictors that meet look like users to each other. Who cannot wait for the others goes on all the same.
            let alone = usage::alone(&self.dir.join(EVICTOR), Some(EVICTOR_PATIENCE));
            let _alone = alone.inspect_err(|error| tracing::debug!(%error, "evicting beside others"));
            used = self.bytes()?;
            if too_much(used) {
                let evicted = self.evict_down_to(budget - reserve, Some(keep))?;
                used = used.saturating_sub(evicted.iter().map(|(_, bytes)| bytes).sum());
            }
        }
        match budget.saturating_sub(used) {
            0 => Err(StoreError::OverBudget { dir: self.dir.clone(), used, budget }),
            allowance => Ok(allowance),
        }
    }

    pub(super) fn over_budget(&self) -> StoreError {
        let used = self.bytes().unwrap_or_default();
        StoreError::OverBudget { dir: self.dir.clone(), used, budget: self.budget.unwrap_or(u64::MAX) }
    }

    /// Removes spaces that nobody uses, longest unused first, until at most `bytes` are left; returns which, and their bytes. One that cannot be
    /// removed stays, and the next one goes.
    pub(super) fn evict_down_to(
        &self,
        bytes: u64,
        keep: Option<&Path>,
    ) -> Result<Vec<(PathBuf, u64)>, StoreError> {
        let mut evicted = Vec::new();
        let mut used = self.bytes()?;
        for (dir, size) in self.unused(keep)? {
            if used <= bytes {
                break;
            }
            pulse::beat();
            match usage::evict(&dir) {
                Ok(true) => {
                    tracing::info!(space = %dir.display(), bytes = size, "cache space evicted");
                    used = used.saturating_sub(size);
                    evicted.push((dir, size));
                }
                Ok(false) => {}
                Err(error) => tracing::warn!(%error, "a cache space cannot be evicted"),
            }
        }
        Ok(evicted)
    }

    /// Spaces that nobody has open, longest unused first, with their bytes.
    pub(super) fn unused(&self, keep: Option<&Path>) -> Result<Vec<(PathBuf, u64)>, StoreError> {
        let mut found: Vec<(SystemTime, PathBuf, u64)> = Vec::new();
        for dir in self.space_dirs()? {
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

const NAME: &str = "store.json";
/// Held while room is made.
const EVICTOR: &str = "evict.lock";
/// Removing a large space takes seconds; who has it for longer than this does not get on.
const EVICTOR_PATIENCE: Duration = Duration::from_secs(20);
