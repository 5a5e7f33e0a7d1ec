//! What tells that a file has not changed since it was read.
//!
//! It includes the time of the last change of the inode, which tools that keep modification times (`cp -p`,
//! `rsync -t`) cannot set. A file that changed less than two seconds ago may change again within the clock's
//! resolution: such a stamp is not relied on.

use std::{fs, io, os::unix::fs::MetadataExt, path::Path, time::Duration};

use super::clock;

/// A file that changed less than this ago may change again unnoticed.
const SETTLED: Duration = Duration::from_secs(2);

/// What tells that a file has not changed: size, inode, and the times of modification and change in
/// nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp(pub(super) [u64; 4]);

impl Stamp {
    /// The stamp of the file at `path`, now.
    pub fn of(path: &Path) -> io::Result<Self> {
        let metadata = fs::metadata(path)?;
        let nanos = |seconds: i64, nanos: i64| {
            (seconds as u64).wrapping_mul(1_000_000_000).wrapping_add(nanos as u64)
        };
        Ok(Self([
            metadata.size(),
            metadata.ino(),
            nanos(metadata.mtime(), metadata.mtime_nsec()),
            nanos(metadata.ctime(), metadata.ctime_nsec()),
        ]))
    }

    /// Whether a later change of the file would show.
    pub(super) fn has_settled(self) -> bool {
        let now = clock::since_epoch();
        let limit = now.saturating_sub(SETTLED).as_nanos();
        u128::from(self.0[2].max(self.0[3])) < limit
    }
}
