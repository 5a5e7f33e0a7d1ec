//! A disk without room under the journal, or one that may not be written: records wait until that is over.
//!
//! A coordinator that ended over it would take with it what only its run's processes still have. Nothing
//! that the record would say has been answered yet, workers wait for their answers as long as their lines
//! are open, and the time is held against nobody ([`clock`](crate::clock)). So it says what it waits for,
//! and waits, until somebody stops the coordinator.
//!
//! The store trusts its file no more once a write has failed: it is opened again for every try.

use redb::{Database, DatabaseError, StorageError};

use super::{
    JournalError,
    disk::{LOOK, Location},
    rows,
};

/// Tries between two lines that say what is waited for.
const TOLD_EVERY: u32 = 120;

/// Whether there was no room: on the disk, within a quota, or in what a file may have.
pub(super) fn is_missing(error: &redb::Error) -> bool {
    matches!(error, redb::Error::Io(error) if is_full(error))
}

/// Whether an error of any file says that there is no room. A file system that its kernel has made read-only
/// after a fault of the disk, or that is mounted so for a while, is mended in place as a full one is.
pub(super) fn is_full(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{FileTooLarge, QuotaExceeded, ReadOnlyFilesystem, StorageFull};
    matches!(error.kind(), StorageFull | QuotaExceeded | FileTooLarge | ReadOnlyFilesystem)
}

/// Opens a journal again that was open a moment ago; nothing if there is no room for that either.
pub(super) fn open_again(place: &Location) -> Result<Option<Database>, JournalError> {
    let failed = |error: &dyn std::fmt::Display| JournalError::Store {
        action: "open",
        directory: place.directory.clone(),
        reason: error.to_string(),
    };
    match place.disk.open(&rows::store()) {
        Ok(database) => Ok(Some(database)),
        Err(DatabaseError::Storage(StorageError::Io(error))) if is_full(&error) => Ok(None),
        Err(DatabaseError::DatabaseAlreadyOpen) => {
            Err(JournalError::InUse { directory: place.directory.clone() })
        }
        Err(error) => Err(failed(&error)),
    }
}

/// One wait for room, which says what it waits for.
#[derive(Debug, Default)]
pub(super) struct Wait {
    tries: u32,
}

impl Wait {
    /// Waits a moment.
    pub fn pause(&mut self, place: &Location) {
        if self.tries.is_multiple_of(TOLD_EVERY) {
            tracing::error!(
                target: "coxswain::run",
                directory = %place.directory.display(),
                "the disk of the journal in {} is full or cannot be written: nothing is lost, and workers \
                 wait; free space there or remount it writable, and the run continues",
                place.directory.display()
            );
        }
        self.tries += 1;
        place.disk.wait();
    }

    /// There is room again.
    pub fn is_over(&self, place: &Location) {
        if self.tries > 0 {
            tracing::warn!(
                target: "coxswain::run",
                directory = %place.directory.display(),
                "the journal can be written again, after {:.1} s",
                (LOOK * self.tries).as_secs_f64()
            );
        }
    }
}
