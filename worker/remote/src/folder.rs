//! Objects as files of this machine's disk, for those who map them into memory: the weights of a model.
//!
//! ```text
//! <dir>/folders/<name>-<digest of the address>/
//!     config.json, model.safetensors, ...      each appears by rename, whole
//!     .model.safetensors.<version>.part        what has come so far, from its beginning
//!     .objects                                 which version of each object the files are
//!     .lock                                    held by the process that brings them
//! ```
//!
//! A folder is of one address, and holds one version of each object: a newer one takes the place of the
//! older, which a process that has it open reads to its end. One process of a machine brings them; others
//! wait for it. What has come of an object is gone on with after an interruption, if the object is still the
//! same.
//!
//! The folders are no part of the cache of blocks and its bound: they stay until somebody deletes them.
//! Whether they fit on the disk is asked before anything is brought.

use std::{
    collections::BTreeMap,
    fs::{self, File, TryLockError},
    io::{self, Read, Write},
    path::{Path, PathBuf},
    sync::Arc,
};

use coxswain_data::place::Piece;
use coxswain_proto::human;
use nix::sys::statvfs::statvfs;

use crate::{
    error::RemoteError,
    object::{BLOCK_BYTES, Object},
    remotes,
};

/// Blocks that are asked for at once: so much of a file is in memory while it is brought.
const AT_ONCE: u64 = 32;
/// Lines that say how far it is.
const TENTHS: u64 = 10;
/// Names the versions that the files are.
const OBJECTS: &str = ".objects";

/// One object on its way to the disk.
struct Download<'a> {
    piece: &'a Piece,
    object: Arc<Object>,
}

impl Download<'_> {
    /// What `.objects` says of the file once it is there.
    fn line(&self) -> String {
        let head = self.piece.head.map_or("whole".to_owned(), |bytes| bytes.to_string());
        format!("{}\t{}\t{head}", self.object.len(), self.object.version())
    }

    /// Bytes that are brought for it.
    fn bytes(&self) -> u64 {
        self.piece.head.unwrap_or(self.object.len()).min(self.object.len())
    }
}

/// A folder that has these files below `address`, after bringing what it lacks. Which file is to blame comes
/// with the error, empty if it is none.
pub fn folder(address: &str, pieces: &[Piece]) -> Result<PathBuf, (String, RemoteError)> {
    let unnamed = |error| (String::new(), error);
    let mut all = Vec::new();
    for piece in pieces {
        let object = remotes::open(&format!("{}/{}", address.trim_end_matches('/'), piece.name));
        let object = object.map_err(|error| (piece.name.clone(), error))?;
        all.push(Download { piece, object });
    }
    let heads = pieces.iter().any(|piece| piece.head.is_some());
    let dir = remotes::directory().map_err(unnamed)?.join("folders").join(name_of(address, heads));
    let refused = |error: io::Error| unnamed(cache_error(&dir, &error));
    fs::create_dir_all(&dir).map_err(refused)?;
    let _lock = lock(&dir, address).map_err(refused)?;
    let mut there = read_objects(&dir);
    let is_there = |coming: &Download<'_>, there: &BTreeMap<String, String>| {
        let len = fs::metadata(dir.join(&coming.piece.name)).map(|file| file.len()).ok();
        there.get(&coming.piece.name) == Some(&coming.line()) && len == Some(coming.object.len())
    };
    let missing: Vec<_> = all.iter().filter(|coming| !is_there(coming, &there)).collect();
    if missing.is_empty() {
        return Ok(dir);
    }
    let mut progress = Progress::begin(address, &dir, &missing).map_err(unnamed)?;
    for coming in missing {
        let name = &coming.piece.name;
        // Until it is whole, the folder has no such file of a version that is known.
        if there.remove(name).is_some() {
            write_objects(&dir, &there).map_err(refused)?;
        }
        bring(coming, &dir, &mut progress).map_err(|error| (name.clone(), error))?;
        there.insert(name.clone(), coming.line());
        write_objects(&dir, &there).map_err(refused)?;
    }
    Ok(dir)
}

/// Brings one file; it appears whole.
fn bring(coming: &Download<'_>, dir: &Path, progress: &mut Progress<'_>) -> Result<(), RemoteError> {
    let part = part_of(dir, coming);
    let failed = |error: io::Error| cache_error(&part, &error);
    remove_parts_of_others(dir, &coming.piece.name, &part);
    let mut file = File::options().append(true).create(true).open(&part).map_err(failed)?;
    let end = coming.bytes();
    let mut at = file.metadata().map_err(failed)?.len();
    if at > end {
        file.set_len(0).map_err(failed)?;
        at = 0;
    }
    while at < end {
        let until = (at - at % BLOCK_BYTES + AT_ONCE * BLOCK_BYTES).min(end);
        for bytes in coming.object.pieces(at..until)? {
            file.write_all(&bytes).map_err(failed)?;
        }
        progress.came(until - at);
        at = until;
    }
    // Of what is not brought there is the length alone: a hole.
    file.set_len(coming.object.len()).and_then(|()| file.sync_all()).map_err(failed)?;
    fs::rename(&part, dir.join(&coming.piece.name)).map_err(failed)
}

/// Where an object lies until it is whole: under a name of its version, so that what has come of another one
/// is not gone on with.
fn part_of(dir: &Path, coming: &Download<'_>) -> PathBuf {
    let version = blake3::hash(coming.line().as_bytes()).to_hex();
    dir.join(format!(".{}.{}.part", coming.piece.name, &version[..8]))
}

/// What has come of other versions is of no use any more.
fn remove_parts_of_others(dir: &Path, name: &str, part: &Path) {
    let is_part = |path: &Path| {
        let file = path.file_name().and_then(|file| file.to_str()).unwrap_or_default();
        file.starts_with(&format!(".{name}.")) && file.ends_with(".part")
    };
    for path in fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path()) {
        if path != part && is_part(&path) {
            // What cannot be removed only takes room.
            let _ = fs::remove_file(&path);
        }
    }
}

/// How far it is, for those who wait.
struct Progress<'a> {
    address: &'a str,
    total: u64,
    there: u64,
    /// Tenths that have been told.
    told: u64,
}

impl<'a> Progress<'a> {
    /// Refuses what does not fit on the disk.
    fn begin(address: &'a str, dir: &Path, missing: &[&Download<'_>]) -> Result<Self, RemoteError> {
        let total: u64 = missing.iter().map(|coming| coming.bytes()).sum();
        let begun = |coming: &&Download<'_>| fs::metadata(part_of(dir, coming)).map_or(0, |part| part.len());
        let there: u64 = missing.iter().map(begun).sum();
        let free = statvfs(dir).map_or(u64::MAX, |disk| disk.blocks_available() * disk.fragment_size());
        if free < total.saturating_sub(there) {
            let [needed, free] = [total - there, free].map(human::bytes);
            let message = format!("{address} needs {needed} more, but only {free} are free");
            return Err(RemoteError::Cache { path: dir.to_path_buf(), message });
        }
        // What only takes a moment is not worth a line.
        if total > AT_ONCE * BLOCK_BYTES {
            let (total, begun) = (human::bytes(total), human::bytes(there));
            tracing::info!(
                "downloading {address}: {total} ({begun} already downloaded) to {}",
                dir.display()
            );
        }
        Ok(Self { address, total, there, told: TENTHS * there / total.max(1) })
    }

    fn came(&mut self, bytes: u64) {
        self.there += bytes;
        let tenths = TENTHS * self.there / self.total.max(1);
        if tenths > self.told && self.total > AT_ONCE * BLOCK_BYTES {
            self.told = tenths;
            let [there, total] = [self.there, self.total].map(human::bytes);
            tracing::info!("{}: {there} of {total}", self.address);
        }
    }
}

/// A name that says where it is from, and is of that address alone.
fn name_of(address: &str, heads: bool) -> String {
    let last = address.trim_end_matches('/').rsplit('/').next().unwrap_or_default();
    let legal = |c: char| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '-' };
    let last: String = last.chars().map(legal).take(64).collect();
    let kind = if heads { "headers" } else { "whole" };
    let digest = blake3::hash(format!("{kind} {}", address.trim_end_matches('/')).as_bytes()).to_hex();
    format!("{last}-{}", &digest[..12])
}

/// Held until it is dropped.
fn lock(dir: &Path, address: &str) -> io::Result<File> {
    let file = File::options().write(true).create(true).truncate(false).open(dir.join(".lock"))?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            tracing::info!("another process downloads {address}: waiting for it");
            file.lock()?;
        }
        Err(TryLockError::Error(error)) => return Err(error),
    }
    Ok(file)
}

fn read_objects(dir: &Path) -> BTreeMap<String, String> {
    let mut text = String::new();
    // What cannot be read is brought again.
    let _ = File::open(dir.join(OBJECTS)).and_then(|mut file| file.read_to_string(&mut text));
    let lines = text.lines().filter_map(|line| line.rsplit_once('\t'));
    lines.map(|(seen, name)| (name.to_owned(), seen.to_owned())).collect()
}

fn write_objects(dir: &Path, objects: &BTreeMap<String, String>) -> io::Result<()> {
    let unfinished = dir.join(format!("{OBJECTS}.part"));
    let lines: String = objects.iter().map(|(name, seen)| format!("{seen}\t{name}\n")).collect();
    fs::write(&unfinished, lines)?;
    fs::rename(&unfinished, dir.join(OBJECTS))
}

fn cache_error(path: &Path, error: &io::Error) -> RemoteError {
    RemoteError::Cache { path: path.to_path_buf(), message: error.to_string() }
}
