//! The store: namespaces, found by what they describe.
//!
//! A store that may not be written is a store that is read: of another user, or on a medium that cannot be
//! written. One for which there is no room at all is an empty one, for as long as it is open.

use std::{
    fs,
    path::{Path, PathBuf},
};

use serde_json::{Value, json};

use super::{
    digest::NamespaceKey,
    directory::Directory,
    error::StoreError,
    namespace::Namespace,
    namespace_file::{self, NamespaceDescription},
    usage::{self, FORMAT, InUse},
};

/// A directory of namespaces. Cheap to clone; holds nothing open.
#[derive(Clone, Debug)]
pub struct Store {
    pub(super) directory: Directory,
    /// Why nothing can be added.
    read_only: Option<String>,
}

impl Store {
    /// Opens the store in `dir`, or makes one. `budget` bounds its bytes.
    pub fn open(dir: &Path, budget: Option<u64>) -> Result<Self, StoreError> {
        if let Some(store) = Self::existing(dir)? {
            let directory = Directory { budget, ..store.directory };
            return Ok(Self { directory, ..store });
        }
        let read_only = match Self::make(dir) {
            Err(StoreError::Full { source, .. }) => Some(source.to_string()),
            made => made.map(|()| None)?,
        };
        Ok(Self { directory: Directory { path: dir.to_path_buf(), budget }, read_only })
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
        // The file that makes a directory a store.
        let path = dir.join(NAME);
        let Some(value) = usage::read_json(&path)? else { return Ok(None) };
        usage::check_format(&path, &value)?;
        let read_only = usage::denies_writing(dir).map(|error| error.to_string());
        Ok(Some(Self { directory: Directory { path: dir.to_path_buf(), budget: None }, read_only }))
    }

    /// Directory.
    pub fn dir(&self) -> &Path {
        &self.directory.path
    }

    /// Why nothing can be added to it, in the system's words; none if it can be written.
    pub fn read_only(&self) -> Option<&str> {
        self.read_only.as_deref()
    }

    /// Where digests of the data set's images are remembered.
    pub fn keys_dir(&self) -> PathBuf {
        self.directory.keys()
    }

    /// The namespace of this description, made if there is none.
    pub fn namespace(&self, description: &NamespaceDescription) -> Result<Namespace, StoreError> {
        let key = description.key();
        let dir = self.dir().join(key.directory());
        if description.width == 0 {
            return Err(StoreError::Foreign { path: dir, detail: "features have at least one value".into() });
        }
        let in_use = InUse::enter(&dir)?;
        match namespace_file::read(&dir) {
            Ok(Some((found, _))) if found == key => {}
            Ok(Some((found, _))) => {
                let detail = format!(
                    "holds namespace {found}, whose directory name collides with that of {key}; use \
                     another cache.dir"
                );
                return Err(StoreError::Foreign { path: dir, detail });
            }
            Err(error @ (StoreError::Newer { .. } | StoreError::Io { .. })) => return Err(error),
            Ok(None) => namespace_file::write(&dir, description)?,
            Err(error) => {
                tracing::warn!(%error, "a cache namespace's description is unusable: writing it again");
                namespace_file::write(&dir, description)?;
            }
        }
        Namespace::open_in(self.directory.clone(), dir, description.clone(), in_use)
    }

    /// The namespace with this key, as a lease names it; none if the store has none.
    pub fn find(&self, key: &NamespaceKey) -> Result<Option<Namespace>, StoreError> {
        let dir = self.dir().join(key.directory());
        if !dir.is_dir() {
            return Ok(None);
        }
        let in_use = InUse::enter(&dir)?;
        match namespace_file::read(&dir)? {
            Some((found, description)) if found == *key => {
                Namespace::open_in(self.directory.clone(), dir, description, in_use).map(Some)
            }
            _ => Ok(None),
        }
    }

    /// Bytes of all its files.
    pub fn bytes(&self) -> Result<u64, StoreError> {
        self.directory.bytes()
    }
}

const NAME: &str = "store.json";
