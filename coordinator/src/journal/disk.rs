//! What a journal lies on: the file of a state directory, or what a simulation has in its place, which fails
//! as disks do.

use std::{
    fmt,
    fs::{self, OpenOptions},
    path::{Path, PathBuf},
    sync::Arc,
    thread,
    time::Duration,
};

use coxswain_proto::in_place;
use redb::{Builder, Database, DatabaseError};

use super::copies::FILE;

/// Between two tries of a disk that has no room.
pub(super) const LOOK: Duration = Duration::from_millis(500);

/// Where the bytes of a journal go.
pub trait Disk: fmt::Debug + Send + Sync {
    /// Opens the store as `store` says, or makes an empty one.
    fn open(&self, store: &Builder) -> Result<Database, DatabaseError>;

    /// Lets some time go by before the next try, for there was no room.
    fn wait(&self);
}

/// Where a journal is: a name for people, and its disk.
#[derive(Clone, Debug)]
pub struct Location {
    pub(super) directory: PathBuf,
    pub(super) disk: Arc<dyn Disk>,
}

impl Location {
    /// On another disk than the file system's.
    pub fn on(directory: &Path, disk: Arc<dyn Disk>) -> Self {
        Self { directory: directory.to_path_buf(), disk }
    }
}

impl From<&Path> for Location {
    fn from(directory: &Path) -> Self {
        Self::on(directory, Arc::new(StateDirectory(directory.to_path_buf())))
    }
}

/// A directory of the file system.
#[derive(Debug)]
struct StateDirectory(PathBuf);

impl Disk for StateDirectory {
    fn open(&self, store: &Builder) -> Result<Database, DatabaseError> {
        fs::create_dir_all(&self.0)?;
        let mut how = OpenOptions::new();
        how.read(true).write(true).create(true).truncate(false);
        store.create_file(in_place::open_by(&mut how, &self.0.join(FILE))?)
    }

    fn wait(&self) {
        thread::sleep(LOOK);
    }
}
