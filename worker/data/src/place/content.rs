//! The bytes of a file.

use std::{io, ops::Range, sync::Arc};

use crate::error::DataError;

/// The bytes of a file.
pub trait Content: Send + Sync {
    /// Number, as it was when the file was opened.
    fn len(&self) -> u64;

    /// Fills `buffer` from `offset`. Short reads are errors.
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()>;

    /// Makes these ranges quick to read, side by side: brings what is far away. What fails here is the
    /// network's fault, or the object's, and no sample's.
    fn bring(&self, _ranges: &[Range<u64>]) -> Result<(), DataError> {
        Ok(())
    }

    /// Whether there is nothing to read.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A file read from its beginning to its end.
pub struct Reader {
    content: Arc<dyn Content>,
    at: u64,
}

impl Reader {
    /// From `at` on.
    pub fn new(content: Arc<dyn Content>, at: u64) -> Self {
        Self { content, at }
    }
}

impl io::Read for Reader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = self.content.len().saturating_sub(self.at);
        let count = buffer.len().min(usize::try_from(left).unwrap_or(usize::MAX));
        self.content.read_at(self.at, &mut buffer[..count])?;
        self.at += count as u64;
        Ok(count)
    }
}
