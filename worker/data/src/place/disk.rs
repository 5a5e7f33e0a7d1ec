//! Files of this machine.

use std::{
    fs::File,
    io,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::Arc,
};

use super::content::Content;
use crate::error::DataError;

struct OnDisk {
    file: File,
    len: u64,
}

impl Content for OnDisk {
    fn len(&self) -> u64 {
        self.len
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(buffer, offset)
    }
}

pub fn open(path: &Path) -> Result<Arc<dyn Content>, DataError> {
    let open = || {
        let file = File::open(path)?;
        let len = file.metadata()?.len();
        Ok(OnDisk { file, len })
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
