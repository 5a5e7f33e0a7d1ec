//! Blocks of objects on the local disk: bounded in bytes, checked, shared by all processes of a machine.
//!
//! ```text
//! <dir>/v1/<object>/<block>     bytes of the block, then their BLAKE3 digest
//! <dir>/v1/bytes                what all blocks take, a number under its file lock
//! ```
//!
//! `<object>` is a digest of the object's address, entity tag and length, so a changed object has blocks of
//! its own. A block appears by rename, whole. It is compared with its digest when a process first reads it;
//! one that does not match is removed, and brought again. When the bound is reached, the blocks that were
//! used longest ago go, an eighth of all at once. A block that goes while somebody has it open can be read to
//! its end.

use std::{
    fs::{self, File, TryLockError},
    io::{self, Read, Seek, Write},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
};

use nix::sys::{stat::futimens, time::TimeSpec};

use crate::error::RemoteError;

/// Bytes of a digest behind a block.
const DIGEST: u64 = blake3::OUT_LEN as u64;

/// Names the content of an object, wherever its bytes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Key(pub [u8; 16]);

impl Key {
    /// The object of this address, version and length.
    pub fn new(address: &str, version: &str, len: u64) -> Self {
        let mut hash = blake3::Hasher::new_derive_key("coxswain bucket cache v1");
        for part in [address.as_bytes(), version.as_bytes(), &len.to_le_bytes()] {
            hash.update(&(part.len() as u64).to_le_bytes());
            hash.update(part);
        }
        let mut key = [0; 16];
        key.copy_from_slice(&hash.finalize().as_bytes()[..16]);
        Self(key)
    }

    fn name(self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

/// The cache of one directory.
#[derive(Debug)]
pub struct Cache {
    dir: PathBuf,
    limit: u64,
    /// Numbers files that are being written.
    unfinished: AtomicU64,
}

impl Cache {
    /// Makes the directory if it is not there. `limit` are the bytes that it may hold.
    pub fn open(dir: &Path, limit: u64) -> Result<Self, RemoteError> {
        let dir = dir.join("v1");
        let refused = |error: io::Error| RemoteError::Cache { path: dir.clone(), message: error.to_string() };
        fs::create_dir_all(&dir).map_err(refused)?;
        let cache = Self { limit, unfinished: AtomicU64::new(0), dir: dir.clone() };
        // Whether it can be written is to be known before a run begins.
        cache.account(0).map_err(refused)?;
        Ok(cache)
    }

    fn path(&self, key: Key, block: u64) -> PathBuf {
        self.dir.join(key.name()).join(block.to_string())
    }

    /// A block as it is; `None` if it is not there.
    pub fn open_block(&self, key: Key, block: u64) -> Option<File> {
        File::open(self.path(key, block)).ok()
    }

    /// A block of `len` bytes, now the most recently used; `None` if it is not there. Compared with its
    /// digest if `check` says so, and removed where it does not match.
    pub fn get(&self, key: Key, block: u64, len: usize, check: bool) -> Option<File> {
        let path = self.path(key, block);
        let file = File::open(&path).ok()?;
        let sound = match check {
            true => matches!(is_sound(&file, len), Ok(true)),
            false => true,
        };
        if !sound {
            tracing::warn!(block = %path.display(), "a cached block is damaged and is downloaded again");
            let _ = fs::remove_file(&path);
            return None;
        }
        // When it was used decides how long it stays; a file system that keeps no times evicts at random.
        let _ = futimens(&file, &TimeSpec::UTIME_NOW, &TimeSpec::UTIME_NOW);
        Some(file)
    }

    /// Keeps a block.
    pub fn put(&self, key: Key, block: u64, bytes: &[u8]) -> io::Result<()> {
        let path = self.path(key, block);
        let dir = self.dir.join(key.name());
        self.account(bytes.len() as u64 + DIGEST)?;
        fs::create_dir_all(&dir)?;
        let number = self.unfinished.fetch_add(1, Ordering::Relaxed);
        let unfinished = dir.join(format!(".{}-{number}", std::process::id()));
        let written = File::create(&unfinished).and_then(|mut file| {
            file.write_all(bytes)?;
            file.write_all(blake3::hash(bytes).as_bytes())
        });
        let kept = written.and_then(|()| fs::rename(&unfinished, &path));
        if kept.is_err() {
            let _ = fs::remove_file(&unfinished);
        }
        kept
    }

    /// Makes room for so many bytes, and counts them.
    fn account(&self, bytes: u64) -> io::Result<()> {
        let path = self.dir.join("bytes");
        let mut counter = File::options().read(true).write(true).create(true).truncate(false).open(path)?;
        match counter.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => counter.lock()?,
            Err(TryLockError::Error(error)) => return Err(error),
        }
        let mut text = String::new();
        counter.read_to_string(&mut text)?;
        // A number that cannot be read is made anew.
        let known = text.trim().parse().unwrap_or(u64::MAX);
        let mut total = u64::saturating_add(known, bytes);
        if total > self.limit {
            total = self.evict(self.limit - self.limit / 8)? + bytes;
        }
        counter.rewind()?;
        counter.set_len(0)?;
        counter.write_all(total.to_string().as_bytes())
    }

    /// Removes the blocks that were used longest ago until the others take at most `most` bytes; says what
    /// they take.
    fn evict(&self, most: u64) -> io::Result<u64> {
        let mut blocks = Vec::new();
        for object in fs::read_dir(&self.dir)?.flatten() {
            for block in fs::read_dir(object.path()).into_iter().flatten().flatten() {
                let Ok(meta) = block.metadata() else { continue };
                let used = meta.modified().ok();
                blocks.push((used, meta.len(), block.path()));
            }
        }
        let mut total: u64 = blocks.iter().map(|(_, len, _)| len).sum();
        blocks.sort();
        for (_, len, path) in &blocks {
            if total <= most {
                break;
            }
            if fs::remove_file(path).is_ok() {
                total -= len;
            }
        }
        // Directories that are empty now; others stay.
        for object in fs::read_dir(&self.dir)?.flatten() {
            let _ = fs::remove_dir(object.path());
        }
        Ok(total)
    }
}

fn is_sound(file: &File, len: usize) -> io::Result<bool> {
    if file.metadata()?.len() != len as u64 + DIGEST {
        return Ok(false);
    }
    let mut bytes = vec![0; len + DIGEST as usize];
    file.read_exact_at(&mut bytes, 0)?;
    let (bytes, digest) = bytes.split_at(len);
    Ok(blake3::hash(bytes).as_bytes()[..] == *digest)
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: Key = Key([7; 16]);

    fn there(cache: &Cache, block: u64) -> bool {
        cache.get(KEY, block, 100, true).is_some()
    }

    #[test]
    fn blocks_that_were_used_longest_ago_make_way() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::open(dir.path(), 8 * (100 + DIGEST)).unwrap();
        for block in 0..8 {
            cache.put(KEY, block, &[block as u8; 100]).unwrap();
            let age = std::time::Duration::from_secs(1000 - block);
            let file = File::options().write(true).open(cache.path(KEY, block)).unwrap();
            file.set_modified(std::time::SystemTime::UNIX_EPOCH - age).unwrap();
        }
        assert!(there(&cache, 0), "and it is the youngest now");
        cache.put(KEY, 8, &[8; 100]).unwrap();
        assert!(!there(&cache, 1) && [0, 2, 7, 8].map(|block| there(&cache, block)) == [true; 4]);
        let total: u64 = fs::read_dir(dir.path().join("v1").join(KEY.name()))
            .unwrap()
            .map(|block| block.unwrap().metadata().unwrap().len())
            .sum();
        assert!(total <= cache.limit, "{total} bytes");
    }

    #[test]
    fn a_damaged_block_is_not_there_any_more() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::open(dir.path(), 1 << 20).unwrap();
        cache.put(KEY, 3, &[1; 100]).unwrap();
        assert!(there(&cache, 3));
        let path = cache.path(KEY, 3);
        let mut bytes = fs::read(&path).unwrap();
        bytes[50] ^= 1;
        fs::write(&path, &bytes).unwrap();
        assert!(!there(&cache, 3) && !path.exists());
        cache.put(KEY, 3, &[1; 100]).unwrap();
        fs::write(&path, &bytes[..40]).unwrap();
        assert!(!there(&cache, 3), "cut off");
    }

    #[test]
    fn a_lost_count_is_made_anew() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::open(dir.path(), 1 << 20).unwrap();
        cache.put(KEY, 0, &[1; 100]).unwrap();
        let counter = dir.path().join("v1/bytes");
        fs::write(&counter, "garbage").unwrap();
        cache.put(KEY, 1, &[1; 100]).unwrap();
        assert_eq!(fs::read_to_string(counter).unwrap(), (2 * (100 + DIGEST)).to_string());
        assert!(there(&cache, 0) && there(&cache, 1));
    }
}
