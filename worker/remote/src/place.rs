//! Objects as the files of data sets.

use std::{
    io,
    ops::Range,
    path::{Path, PathBuf},
    sync::Arc,
};

use coxswain_data::{
    DataError,
    place::{self, Content, Piece, Remote},
};

use crate::{
    error::RemoteError,
    folder,
    object::Object,
    pinned,
    remotes::{self, BlockCache},
};

/// From now on, addresses are read by this crate, wherever this process names a data set by one.
pub fn install() {
    place::reach(&Buckets);
}

struct Buckets;

struct RemoteFile {
    path: PathBuf,
    object: Arc<Object>,
}

impl Content for RemoteFile {
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

impl Remote for Buckets {
    fn keep(&self, dir: Option<PathBuf>, bytes: u64) {
        remotes::keep(BlockCache { dir, bytes });
    }

    fn enter(&self, root: &Path) -> Result<(), DataError> {
        remotes::enter(address(root)?).map_err(fault(root))
    }

    fn open(&self, path: &Path) -> Result<Arc<dyn Content>, DataError> {
        let object = remotes::open(address(path)?).map_err(fault(path))?;
        Ok(Arc::new(RemoteFile { path: path.to_path_buf(), object }))
    }

    fn bytes(&self, path: &Path) -> Result<Option<u64>, DataError> {
        remotes::bytes(address(path)?).map_err(fault(path))
    }

    fn entries(&self, dir: &Path) -> Result<Option<Vec<PathBuf>>, DataError> {
        let names = remotes::entries(address(dir)?).map_err(fault(dir))?;
        Ok(names.map(|names| names.into_iter().map(|name| dir.join(name)).collect()))
    }

    fn pin(&self, root: &Path, file: &Path) -> Result<(), DataError> {
        pinned::pin(address(root)?, file).map_err(|(object, error)| of(root, &object, error))
    }

    fn folder(&self, root: &Path, pieces: &[Piece]) -> Result<PathBuf, DataError> {
        folder::folder(address(root)?, pieces).map_err(|(object, error)| of(root, &object, error))
    }

    fn version(&self, path: &Path) -> Result<[u8; 16], DataError> {
        Ok(remotes::open(address(path)?).map_err(fault(path))?.key().0)
    }
}

/// What is wrong below an address: with the object of this path, or with no particular one.
fn of(root: &Path, object: &str, error: RemoteError) -> DataError {
    match object.is_empty() {
        true => fault(root)(error),
        false => fault(&root.join(object))(error),
    }
}

fn fault(path: &Path) -> impl FnOnce(RemoteError) -> DataError {
    let path = path.to_path_buf();
    move |error| {
        let passes = matches!(error, RemoteError::Unreachable { .. });
        DataError::Remote { path, fault: error.to_string(), passes }
    }
}

fn address(path: &Path) -> Result<&str, DataError> {
    let bad = || fault(path)(RemoteError::Address("it is not UTF-8".into()));
    path.to_str().ok_or_else(bad)
}
