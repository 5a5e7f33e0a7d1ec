//! A folder of a bucket that is written: what keeps a run beside its disk. Names are paths below the folder's
//! address.
//!
//! One object at a time is written whole or not at all, and [`Storage::swap`] writes one only over the
//! version that the caller knows: two who both believe that a folder is theirs find out by it. What several
//! objects mean together is for the caller.

use std::{fmt, fs::File};

/// What tells an object from what it was before.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Version {
    /// Entity tag.
    pub tag: Option<String>,
    /// Number, where the store counts (Google's does).
    pub number: Option<String>,
}

/// Objects below one address. Calls block, and are tried again for as long as requests of a data set are.
pub trait Storage: Send + Sync {
    /// A small object and its version; `None` if it is not there.
    fn get(&self, name: &str) -> Result<Option<(Vec<u8>, Version)>, StorageError>;

    /// Writes a small object if it is still of the version `before`, or not there if that is absent. `None`
    /// if it is not: nothing is written then. An attempt whose answer was lost may have been carried out,
    /// so the caller reads what is there.
    fn swap(
        &self,
        name: &str,
        bytes: &[u8],
        before: Option<&Version>,
    ) -> Result<Option<Version>, StorageError>;

    /// Writes a file of so many bytes as an object.
    fn upload(&self, name: &str, file: &File, bytes: u64) -> Result<(), StorageError>;

    /// Writes an object of so many bytes to a file.
    fn download(&self, name: &str, bytes: u64, file: &File) -> Result<(), StorageError>;

    /// Names of all objects that begin with a path.
    fn list(&self, below: &str) -> Result<Vec<String>, StorageError>;

    /// Removes an object, if it is there.
    fn remove(&self, name: &str) -> Result<(), StorageError>;
}

/// Why an object, or its bucket, cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StorageError {
    /// Address.
    pub object: String,
    /// What is wrong, and what helps.
    pub fault: String,
    /// Whether the object itself is to blame: it is not there, or not what it is to be.
    pub of_object: bool,
}

impl fmt::Display for StorageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.object, self.fault)
    }
}

impl std::error::Error for StorageError {}
