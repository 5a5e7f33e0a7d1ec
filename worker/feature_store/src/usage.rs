//! Files that appear whole or not at all, and locks that say who is alive: the store's dealings with the file
//! system.
//!
//! A lock is `flock`'s: it belongs to an open file and ends with its process, however that ends. So "in use"
//! needs no process ids, no clocks and no cleaning up. On a network file system it works as far as that one
//! supports `flock` between nodes.

use std::{
    fs::{self, File, TryLockError},
    io::{self, Write},
    os::unix::fs::MetadataExt,
    path::Path,
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, SystemTime},
};

use nix::sys::statfs;
use serde::Serialize;
use serde_json::Value;

use super::{clock, digest::Digest, error::StoreError};
use coxswain_nn::pulse;

/// Version of the whole layout, `store.json` and `space.json`; a reader refuses newer ones.
pub const FORMAT: u32 = 1;
/// Between two looks at whether another process has let go of a lock.
const LOOK_AGAIN: Duration = Duration::from_millis(20);
/// Name of the lock in a namespace's directory. Its time of change is when the namespace was last opened or
/// left.
pub(super) const LOCK: &str = "in-use.lock";

/// Whether the system refuses to write at a place, today and tomorrow: then what is there is read, and
/// nothing is added.
pub(super) fn is_denied(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem)
}

/// Why no file can be made in `dir`; none if one can, or if that may change.
pub(super) fn denies_writing(dir: &Path) -> Option<io::Error> {
    let probe = dir.join(format!("open-{}.tmp", unique()));
    match File::create_new(&probe) {
        // What stays behind is removed by `gc`.
        Ok(_) => fs::remove_file(&probe).err().filter(is_denied),
        Err(error) => Some(error).filter(is_denied),
    }
}

/// The sign that a process uses a namespace: a shared lock, and a time.
pub(super) struct InUse {
    file: File,
}

impl InUse {
    /// Makes the directory if there is none, and keeps evictors out of it. One that belongs to another
    /// user is entered, too.
    pub fn enter(dir: &Path) -> Result<Self, StoreError> {
        let path = dir.join(LOCK);
        loop {
            match fs::create_dir_all(dir) {
                Ok(()) => {}
                // Evicted between being found there and being looked at.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists && !dir.is_file() => continue,
                Err(error) => return Err(StoreError::io("create", dir)(error)),
            }
            let file = match File::options().read(true).append(true).create(true).open(&path) {
                Ok(file) => file,
                // Evicted between the two calls.
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                // A lock needs no right to write.
                Err(error) if is_denied(&error) => {
                    File::open(&path).map_err(StoreError::io("open", &path))?
                }
                Err(error) => return Err(StoreError::io("open", &path)(error)),
            };
            // Waits only while another process evicts, which is a rename.
            file.lock_shared().map_err(StoreError::io("lock", &path))?;
            if is_still_at(&file, &path) {
                let entered = Self { file };
                entered.touch();
                return Ok(entered);
            }
        }
    }

    /// Notes that the namespace was used now. A store that cannot be written is still read; it is then
    /// evicted by older times.
    fn touch(&self) {
        let _ = self.file.set_modified(clock::file_time());
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        self.touch();
    }
}

/// Whether an open file is the one that `path` names now.
fn is_still_at(file: &File, path: &Path) -> bool {
    let place = |metadata: &fs::Metadata| (metadata.dev(), metadata.ino());
    matches!((fs::metadata(path), file.metadata()), (Ok(there), Ok(here)) if place(&there) == place(&here))
}

/// When the namespace in `dir` was last opened or left, and whether a living process has it open.
pub(super) fn last_use(dir: &Path) -> (Option<SystemTime>, bool) {
    let Ok(file) = to_lock(&dir.join(LOCK)) else { return (None, false) };
    let used = file.try_lock().is_err();
    (file.metadata().and_then(|metadata| metadata.modified()).ok(), used)
}

/// Waits until no other process has the lock at `path`, which is made if there is none; with `patience` for
/// so long at most, since a process of another run that has it may stand still, which this run cannot see.
pub(super) fn alone(path: &Path, patience: Option<Duration>) -> Result<File, StoreError> {
    let file = File::options().append(true).create(true).open(path).map_err(StoreError::io("open", path))?;
    let deadline = patience.map(|patience| clock::now() + patience);
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::WouldBlock) if deadline.is_none_or(|at| clock::now() < at) => pulse::beat(),
            Err(TryLockError::WouldBlock) => {
                return Err(StoreError::io("lock", path)(io::ErrorKind::TimedOut.into()));
            }
            Err(TryLockError::Error(error)) => return Err(StoreError::io("lock", path)(error)),
        }
        std::thread::sleep(LOOK_AGAIN);
    }
}

/// Whether `dir` lies on a file system where a removed file may be lost for processes of other machines that
/// have it open. What is mapped ends its process then.
pub(super) fn loses_open_files(dir: &Path) -> bool {
    let kinds = [statfs::NFS_SUPER_MAGIC, statfs::SMB_SUPER_MAGIC];
    statfs::statfs(dir).is_ok_and(|about| kinds.contains(&about.filesystem_type()))
}

/// Removes a namespace that is not in use; false if it is. It is gone for all processes at once, by a rename.
/// One that another evictor has taken is gone, too.
pub(super) fn evict(dir: &Path) -> Result<bool, StoreError> {
    let path = dir.join(LOCK);
    let file = match File::options().read(true).append(true).create(true).open(&path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(true),
        Err(error) => return Err(StoreError::io("open", &path)(error)),
    };
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => return Ok(false),
        Err(TryLockError::Error(error)) => return Err(StoreError::io("lock", &path)(error)),
    }
    if !is_still_at(&file, &path) {
        // Evicted between the two calls. What may be there by now is another namespace, and in use.
        return Ok(true);
    }
    let trash = dir.with_file_name(format!("{TRASH}{}", unique()));
    fs::rename(dir, &trash).map_err(StoreError::io("evict", dir))?;
    drop(file);
    clear(&trash)?;
    Ok(true)
}

/// Removes a directory that is out of use, which others may be doing as well.
pub(super) fn clear(trash: &Path) -> Result<(), StoreError> {
    match fs::remove_dir_all(trash) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(StoreError::io("remove", trash)(error)),
        _ => Ok(()),
    }
}

/// Beginning of the name of a directory that is being removed.
pub(super) const TRASH: &str = ".evicted-";

/// Whether the writer of the unfinished file at `path` still lives.
pub(super) fn writer_lives(path: &Path) -> bool {
    to_lock(path).is_ok_and(|file| file.try_lock().is_err())
}

/// A file that is there, open for an attempt to lock it. A network file system gives an exclusive lock only
/// to who may write. One that is open and cannot be locked counts as locked.
fn to_lock(path: &Path) -> io::Result<File> {
    match File::options().read(true).append(true).open(path) {
        Err(error) if is_denied(&error) => File::open(path),
        other => other,
    }
}

/// A name that no other writer on any machine has.
pub(super) fn unique() -> String {
    static COUNTER: AtomicU64 = AtomicU64::new(0);
    let host = nix::unistd::gethostname().unwrap_or_default();
    let now = clock::since_epoch();
    let words =
        [u128::from(std::process::id()), now.as_nanos(), COUNTER.fetch_add(1, Ordering::Relaxed).into()];
    let words: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    let host = std::os::unix::ffi::OsStrExt::as_bytes(host.as_os_str());
    let digest = Digest::of("coxswain vl cache file name v1", [("host", host), ("words", &words[..])]);
    // By time first, so that a listing is in order of age; 64 bits of nanoseconds last until 2554.
    format!("{:016x}-{}", now.as_nanos() as u64, &digest.to_string()[..8])
}

/// Brings a directory's entries to the disk.
pub(super) fn sync_dir(dir: &Path) -> Result<(), StoreError> {
    coxswain_proto::directory::sync(dir).map_err(StoreError::io("sync", dir))
}

/// Writes a file that is there whole or not at all, and on disk when this returns.
pub(super) fn write_whole(path: &Path, bytes: &[u8]) -> Result<(), StoreError> {
    write_whole_by(path, |file| file.write_all(bytes))
}

/// Writes a file as [`write_whole`] does, with what `write` writes.
pub(super) fn write_whole_by(
    path: &Path,
    write: impl FnOnce(&mut File) -> io::Result<()>,
) -> Result<(), StoreError> {
    stage(path, |file| {
        write(file)?;
        file.sync_all()
    })?;
    path.parent().map_or(Ok(()), sync_dir)
}

/// Writes a file under another name and gives it its own.
fn stage(path: &Path, write: impl FnOnce(&mut File) -> io::Result<()>) -> Result<(), StoreError> {
    let staged = path.with_file_name(format!("open-{}.tmp", unique()));
    let staging = || {
        let mut file = File::create_new(&staged)?;
        file.lock()?;
        write(&mut file)?;
        fs::rename(&staged, path)
    };
    staging().map_err(|error: io::Error| {
        // Whatever is left of it is invisible.
        let _ = fs::remove_file(&staged);
        StoreError::io("write", path)(error)
    })
}

/// Writes a value as readable JSON, whole or not at all, and on disk when this returns.
pub(super) fn write_json(path: &Path, value: &impl Serialize) -> Result<(), StoreError> {
    write_whole(path, &readable(path, value)?)
}

/// Writes a value as readable JSON, whole or not at all for every process; when it is on disk is the system's
/// affair.
pub(super) fn place_json(path: &Path, value: &impl Serialize) -> Result<(), StoreError> {
    let text = readable(path, value)?;
    stage(path, |file| file.write_all(&text))
}

fn readable(path: &Path, value: &impl Serialize) -> Result<Vec<u8>, StoreError> {
    let text = serde_json::to_string_pretty(value).map_err(|error| StoreError::Foreign {
        path: path.to_path_buf(),
        detail: format!("cannot be written as JSON: {error}"),
    })?;
    Ok((text + "\n").into_bytes())
}

/// Reads a JSON file; none if there is none.
pub(super) fn read_json(path: &Path) -> Result<Option<Value>, StoreError> {
    let text = match fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(StoreError::io("read", path)(error)),
    };
    serde_json::from_str(&text).map(Some).map_err(|error| StoreError::Foreign {
        path: path.to_path_buf(),
        detail: format!("is not JSON ({error}); remove it"),
    })
}

/// Refuses a file whose `format` is newer than ours.
pub(super) fn check_format(path: &Path, value: &Value) -> Result<(), StoreError> {
    let path = path.to_path_buf();
    match value.get("format").and_then(Value::as_u64) {
        Some(found) if found > FORMAT.into() => Err(StoreError::Newer { path, found, known: FORMAT }),
        Some(_) => Ok(()),
        None => Err(StoreError::Foreign { path, detail: "has no `format`; is this a feature cache?".into() }),
    }
}
