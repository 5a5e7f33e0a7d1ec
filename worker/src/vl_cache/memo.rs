//! Digests of files that were read before, so that they are not read again: by path, size, inode and times.
//!
//! ```text
//! magic "COXVLMEM", version u32, columns u32
//! a column:  path, what (u32 length and text each), stamp 4 x u64, digests u64, digest [32] x digests
//! end:       BLAKE3 [16] of everything before
//! ```
//!
//! A *column* is what was found in one file: one digest for files of weights that belong together, one for each row for a camera of a data file. It holds as long as the
//! file's stamp is the same. The stamp includes the time of the last change of the inode, which tools that keep modification times (`cp -p`,
//! `rsync -t`) cannot set; and a file that changed less than two seconds ago is not remembered, since it may change again within the
//! clock's resolution. A memo that is missing or damaged costs reading the files again.

use std::{
    collections::BTreeMap,
    fs::{self, File, TryLockError},
    io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use super::{digest::Digest, error::StoreError, store::Store, usage};
use crate::pulse;

const MAGIC: &[u8; 8] = b"COXVLMEM";
const VERSION: u32 = 1;
const CHECKSUM: usize = 16;
/// A file that changed less than this ago may change again unnoticed.
const SETTLED: Duration = Duration::from_secs(2);
/// Between two looks at whether another process has closed the memo.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// What tells that a file has not changed: size, inode, and the times of modification and change in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp([u64; 4]);

impl Stamp {
    /// Of the file at `path`, now.
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

    fn has_settled(self) -> bool {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let limit = now.saturating_sub(SETTLED).as_nanos();
        u128::from(self.0[2].max(self.0[3])) < limit
    }
}

/// Remembered digests. One process at a time has a memo open; others wait, and find what it has read.
pub struct Memo {
    path: PathBuf,
    columns: BTreeMap<(PathBuf, String), (Stamp, Vec<Digest>)>,
    changed: bool,
    _lock: File,
}

impl Memo {
    /// Opens the memo `name` of a store; waits until no other process has it open.
    pub fn open(store: &Store, name: &str) -> Result<Self, StoreError> {
        let dir = store.keys_dir();
        fs::create_dir_all(&dir).map_err(StoreError::io("create", &dir))?;
        let lock_path = dir.join(format!("{name}.lock"));
        let lock = File::options().append(true).create(true).open(&lock_path);
        let lock = lock.map_err(StoreError::io("open", &lock_path))?;
        // Whoever holds it reads what is wanted here, too, and shows by itself whether it gets on.
        loop {
            match lock.try_lock() {
                Ok(()) => break,
                Err(TryLockError::WouldBlock) => pulse::beat(),
                Err(TryLockError::Error(error)) => return Err(StoreError::io("lock", &lock_path)(error)),
            }
            std::thread::sleep(LOOK_AGAIN);
        }
        let path = dir.join(format!("{name}.memo"));
        let columns = match fs::read(&path) {
            Ok(bytes) => parse(&path, &bytes)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => BTreeMap::new(),
            Err(error) => return Err(StoreError::io("read", &path)(error)),
        };
        Ok(Self { path, columns, changed: false, _lock: lock })
    }

    /// What was found in `file` under the name `what`, if the file has not changed since.
    pub fn get(&self, file: &Path, what: &str) -> Option<&[Digest]> {
        let (stamp, digests) = self.columns.get(&(file.to_path_buf(), what.to_owned()))?;
        (Stamp::of(file).ok()? == *stamp).then_some(digests)
    }

    /// Remembers what was found in `file`; `stamp` was taken before reading it.
    pub fn put(&mut self, file: &Path, what: &str, stamp: Stamp, digests: Vec<Digest>) {
        if stamp.has_settled() {
            self.columns.insert((file.to_path_buf(), what.to_owned()), (stamp, digests));
            self.changed = true;
        }
    }

    /// Writes what is new to disk, without files that are gone.
    pub fn save(mut self) -> Result<(), StoreError> {
        if !self.changed {
            return Ok(());
        }
        self.columns.retain(|(file, _), _| file.exists());
        let mut bytes = Vec::new();
        bytes.extend_from_slice(MAGIC);
        bytes.extend_from_slice(&VERSION.to_le_bytes());
        bytes.extend_from_slice(&(self.columns.len() as u32).to_le_bytes());
        for ((file, what), (stamp, digests)) in &self.columns {
            for text in [std::os::unix::ffi::OsStrExt::as_bytes(file.as_os_str()), what.as_bytes()] {
                bytes.extend_from_slice(&(text.len() as u32).to_le_bytes());
                bytes.extend_from_slice(text);
            }
            stamp.0.iter().for_each(|word| bytes.extend_from_slice(&word.to_le_bytes()));
            bytes.extend_from_slice(&(digests.len() as u64).to_le_bytes());
            digests.iter().for_each(|digest| bytes.extend_from_slice(&digest.0));
        }
        let checksum = blake3::hash(&bytes);
        bytes.extend_from_slice(&checksum.as_bytes()[..CHECKSUM]);
        usage::write_whole(&self.path, &bytes)
    }
}

impl Store {
    /// What `read` finds in `files` together, read only if one of them has changed since it was last asked for under this name. Other
    /// processes that ask for it meanwhile wait, and find it.
    pub fn digest_of<'a, E: From<StoreError>>(
        &self,
        files: impl Iterator<Item = &'a Path>,
        name: &str,
        read: impl FnOnce() -> Result<Digest, E>,
    ) -> Result<Digest, E> {
        let mut memo = Memo::open(self, "files")?;
        let mut stamped = Vec::new();
        for file in files {
            let path = fs::canonicalize(file).map_err(StoreError::io("find", file))?;
            let stamp = Stamp::of(&path).map_err(StoreError::io("read", &path))?;
            stamped.push((path, stamp));
        }
        // Remembered with every file, so that a change of any of them is one of all.
        let mut known = stamped.iter().map(|(path, _)| memo.get(path, name));
        if let Some(Some(first @ [digest])) = known.next()
            && known.all(|other| other == Some(first))
        {
            return Ok(*digest);
        }
        let digest = read()?;
        for (path, stamp) in stamped {
            memo.put(&path, name, stamp, vec![digest]);
        }
        // What cannot be remembered is read again next time.
        if let Err(error) = memo.save() {
            tracing::warn!(%error, "a digest of files is not remembered");
        }
        Ok(digest)
    }
}

type Columns = BTreeMap<(PathBuf, String), (Stamp, Vec<Digest>)>;

/// An older or damaged memo is as good as none; a newer one is refused.
fn parse(path: &Path, bytes: &[u8]) -> Result<Columns, StoreError> {
    let mut rest = Reader(bytes);
    let version = (rest.take(8) == Some(MAGIC)).then(|| rest.u32()).flatten();
    if let Some(found) = version.filter(|found| *found > VERSION) {
        return Err(StoreError::Newer { path: path.to_path_buf(), found: found.into(), known: VERSION });
    }
    let sound = bytes.len() > CHECKSUM && {
        let (content, checksum) = bytes.split_at(bytes.len() - CHECKSUM);
        blake3::hash(content).as_bytes()[..CHECKSUM] == *checksum
    };
    match sound.then(|| rest.columns()).flatten() {
        Some(columns) => Ok(columns),
        None => {
            tracing::warn!(path = %path.display(), "memo of file digests is damaged; the files are read again");
            Ok(Columns::new())
        }
    }
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(taken)
    }

    fn u32(&mut self) -> Option<u32> {
        Some(u32::from_le_bytes(self.take(4)?.try_into().ok()?))
    }

    fn u64(&mut self) -> Option<u64> {
        Some(u64::from_le_bytes(self.take(8)?.try_into().ok()?))
    }

    fn text(&mut self) -> Option<&'a [u8]> {
        let len = self.u32()?;
        self.take(len as usize)
    }

    fn columns(&mut self) -> Option<Columns> {
        let mut columns = Columns::new();
        for _ in 0..self.u32()? {
            let file =
                PathBuf::from(<std::ffi::OsStr as std::os::unix::ffi::OsStrExt>::from_bytes(self.text()?));
            let what = String::from_utf8(self.text()?.to_vec()).ok()?;
            let stamp = Stamp([self.u64()?, self.u64()?, self.u64()?, self.u64()?]);
            let count = usize::try_from(self.u64()?).ok()?;
            let digests = self.take(count.checked_mul(32)?)?.as_chunks::<32>().0;
            columns.insert((file, what), (stamp, digests.iter().map(|bytes| Digest(*bytes)).collect()));
        }
        Some(columns)
    }
}
