//! Objects of buckets and web servers.

use std::{
    io,
    ops::Range,
    path::{Path, PathBuf},
    sync::Arc,
};

use coxswain_remote::{Kept, Object, RemoteError};

use super::Content;
use crate::error::DataError;

struct Far {
    path: PathBuf,
    object: Arc<Object>,
}

impl Content for Far {
    fn len(&self) -> u64 {
        self.object.len()
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.object.read_at(offset, buffer)
    }

    fn bring(&self, ranges: &[Range<u64>]) -> Result<(), DataError> {
        self.object.bring(ranges).map_err(fault(&self.path))
    }
}

fn fault(path: &Path) -> impl FnOnce(RemoteError) -> DataError {
    let path = path.to_path_buf();
    move |error| DataError::Remote { path, fault: error.to_string() }
}

/// Where what is brought is kept from now on, and how many bytes of it.
pub fn keep(dir: Option<PathBuf>, bytes: u64) {
    coxswain_remote::keep(Kept { dir, bytes });
}

pub fn enter(root: &Path) -> Result<(), DataError> {
    coxswain_remote::enter(address(root)?).map_err(fault(root))
}

pub fn pin(root: &Path, file: &Path) -> Result<(), DataError> {
    let pinned = coxswain_remote::pin(address(root)?, file);
    pinned.map_err(|(object, error)| fault(&root.join(object))(error))
}

pub fn open(path: &Path) -> Result<Arc<dyn Content>, DataError> {
    let object = coxswain_remote::open(address(path)?).map_err(fault(path))?;
    Ok(Arc::new(Far { path: path.to_path_buf(), object }))
}

pub fn bytes(path: &Path) -> Result<Option<u64>, DataError> {
    coxswain_remote::bytes(address(path)?).map_err(fault(path))
}

pub fn entries(dir: &Path) -> Result<Option<Vec<PathBuf>>, DataError> {
    let names = coxswain_remote::entries(address(dir)?).map_err(fault(dir))?;
    Ok(names.map(|names| names.into_iter().map(|name| dir.join(name)).collect()))
}

fn address(path: &Path) -> Result<&str, DataError> {
    let bad = || fault(path)(RemoteError::Address("it is not text".into()));
    path.to_str().ok_or_else(bad)
}
