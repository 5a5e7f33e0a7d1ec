//! Files of this machine, or of a server that this machine has mounted.
//!
//! Such a server may forget what was open, when it is started again or moves: a file is then opened again.
//! What it says while it is away is no fault of any file ([`DataError::is_remote`]).

use std::{
    fs::File,
    io,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::Arc,
};

use coxswain_proto::bounded;

use super::content::Content;
use crate::error::DataError;

struct OnDisk {
    path: PathBuf,
    file: File,
    len: u64,
}

impl Content for OnDisk {
    fn len(&self) -> u64 {
        self.len
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        match self.file.read_exact_at(buffer, offset) {
            Err(error) if error.kind() == io::ErrorKind::StaleNetworkFileHandle => {
                let again = File::open(&self.path)?;
                match again.metadata()?.len() == self.len {
                    true => again.read_exact_at(buffer, offset),
                    // Another file lies there by now.
                    false => Err(error),
                }
            }
            read => read,
        }
    }
}

pub fn open(path: &Path) -> Result<Arc<dyn Content>, DataError> {
    let open = || {
        let file = bounded::open(path)?;
        let len = file.metadata()?.len();
        Ok(OnDisk { path: path.to_owned(), file, len })
    };
    open().map(|file| Arc::new(file) as _).map_err(DataError::io(path, "read"))
}

pub fn entries(dir: &Path) -> Result<Vec<PathBuf>, DataError> {
    let entries = std::fs::read_dir(dir).map_err(DataError::io(dir, "list"))?;
    let paths: Result<Vec<_>, _> = entries.map(|entry| entry.map(|entry| entry.path())).collect();
    let mut paths = paths.map_err(DataError::io(dir, "list"))?;
    paths.sort();
    Ok(paths)
}
