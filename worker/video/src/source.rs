//! Bytes by range: a file, memory, later an object store.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use crate::error::Fault;

/// A video's bytes. Ranges are asked for once per group of pictures, so an implementation may pay latency per
/// call.
pub trait Source: Send + Sync {
    /// Length in bytes, as it was when the source was made.
    fn len(&self) -> u64;

    /// Fills `buffer` from `offset`. Short reads are errors.
    fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<(), Fault>;

    /// Whether there is nothing to read.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A file, opened for each read: a data set has thousands, and an open costs microseconds where a decode
/// costs milliseconds. A file whose length or time of change differs from the first look is refused.
#[derive(Debug)]
pub struct FileSource {
    path: PathBuf,
    len: u64,
    modified: Option<SystemTime>,
}

impl FileSource {
    /// Looks at the file; reads nothing yet.
    pub fn new(path: &Path) -> Result<Self, Fault> {
        let meta = std::fs::metadata(path).map_err(io_fault)?;
        if !meta.is_file() {
            return Err(Fault::Io("not a file".to_owned()));
        }
        Ok(Self { path: path.to_owned(), len: meta.len(), modified: meta.modified().ok() })
    }
}

impl Source for FileSource {
    fn len(&self) -> u64 {
        self.len
    }

    fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<(), Fault> {
        let file = File::open(&self.path).map_err(io_fault)?;
        let meta = file.metadata().map_err(io_fault)?;
        if meta.len() != self.len {
            return Err(Fault::Changed(format!("{} bytes, was {}", meta.len(), self.len)));
        }
        if meta.modified().ok() != self.modified {
            return Err(Fault::Changed("its modification time differs".to_owned()));
        }
        file.read_exact_at(buffer, offset).map_err(io_fault)
    }
}

/// A whole file in memory.
impl Source for Vec<u8> {
    fn len(&self) -> u64 {
        self.as_slice().len() as u64
    }

    fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<(), Fault> {
        let bytes = usize::try_from(offset).ok().and_then(|at| self.get(at..)?.get(..buffer.len()));
        buffer.copy_from_slice(bytes.ok_or_else(|| Fault::Io("read beyond the end".to_owned()))?);
        Ok(())
    }
}

fn io_fault(error: io::Error) -> Fault {
    Fault::Io(error.to_string())
}
