//! A run is brought from its bucket to the disk of this machine, and goes on as from a checkpoint of its own.
//!
//! All of a set is brought to a directory beside, each file compared with its length and digest there; then
//! it takes its places by renames. What lay there is set aside, not removed: it is of an earlier launch,
//! after which the run has gone on elsewhere.

use std::{
    fmt,
    fs::{self, File},
    io,
    path::{Component, Path, PathBuf},
    time::Duration,
};

use coxswain_proto::{directory, human};
use coxswain_remote::{Storage, StorageError};
use coxswain_worker::train::checkpoint::{FileEntry, Store};

use super::{
    error::{BucketError, disk},
    index::{Index, Set, Upload},
    local::Record,
    owner::side_by_side,
};
use crate::clock;

/// Where a set is brought to first.
const COMING: &str = ".from-bucket";
/// Held while one launcher of this directory brings a run.
const LOCK: &str = ".bucket.lock";
/// What is another launch's wherever it is: where the run goes on, and what it has recorded.
const STATE: [&str; 2] = ["checkpoints", "coordinator"];

/// What was brought.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RestoreSummary {
    /// Steps that are done.
    pub step: u64,
    /// Bytes of all its files.
    pub bytes: u64,
    /// How long it took.
    pub took: Duration,
    /// Where what lay there is now, if there was anything.
    pub aside: Option<PathBuf>,
}

impl fmt::Display for RestoreSummary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { step, bytes, took, aside } = self;
        let (bytes, took) = (human::bytes(*bytes), human::time(*took));
        write!(f, "downloaded the run from its bucket, as it was after step {step}: {bytes} in {took}")?;
        match aside {
            Some(aside) => write!(f, "; the earlier files are now in {}", aside.display()),
            None => Ok(()),
        }
    }
}

/// Brings the newest whole set, if this directory is not as far itself.
pub fn bring(
    storage: &dyn Storage,
    address: &str,
    index: &Index,
    output: &Path,
) -> Result<Option<RestoreSummary>, BucketError> {
    let Some(newest) = index.newest() else { return Ok(None) };
    let (begin, lock) = (clock::now(), output.join(LOCK));
    fs::create_dir_all(output).map_err(disk(output))?;
    let _held = lock_of(&lock).map_err(disk(&lock))?;
    if goes_on_here(address, index, newest, output) {
        return Ok(None);
    }
    let coming = output.join(COMING);
    let mut damage = None;
    for set in index.sets.iter().rev() {
        if coming.exists() {
            fs::remove_dir_all(&coming).map_err(disk(&coming))?;
        }
        match side_by_side(&set.files, |kept| bring_file(storage, address, kept, &coming)) {
            Ok(()) => {
                let aside = take_place(&coming, output).map_err(disk(output))?;
                let (step, bytes) = (set.step, set.bytes());
                return Ok(Some(RestoreSummary { step, bytes, took: begin.elapsed(), aside }));
            }
            Err(BucketError::Storage(error)) if error.of_object => {
                let step = set.step;
                tracing::warn!(%error, "checkpoint {step} in the bucket is damaged; trying an older one");
                damage.get_or_insert(error.to_string());
            }
            Err(error) => return Err(error),
        }
    }
    let damage = damage.unwrap_or_default();
    Err(BucketError::Damaged { address: address.to_owned(), damage })
}

/// Whether the last launch that had the run was one of this directory, which has what the bucket has.
pub fn goes_on_here(address: &str, index: &Index, newest: &Set, output: &Path) -> bool {
    let last = Record::load(output).is_some_and(|record| {
        record.address == address && [record.launcher, record.before].contains(&index.launcher)
    });
    last && Store::new(output).newest().is_ok_and(|found| found.manifest.step >= newest.step)
}

fn bring_file(storage: &dyn Storage, address: &str, kept: &Upload, coming: &Path) -> Result<(), BucketError> {
    let damaged = |fault: String| {
        let object = format!("{address}/{}", kept.object);
        BucketError::from(StorageError { object, fault, of_object: true })
    };
    let is_below = Path::new(&kept.path).components().all(|part| matches!(part, Component::Normal(_)));
    if !is_below || kept.path.is_empty() {
        return Err(damaged(format!("its path `{}` is not inside the output directory", kept.path)));
    }
    let path = coming.join(&kept.path);
    let opened = path.parent().map_or(Ok(()), fs::create_dir_all).and_then(|()| create(&path));
    let file = opened.map_err(disk(&path))?;
    storage.download(&kept.object, kept.entry.bytes, &file)?;
    let entry = FileEntry::describe(&path).map_err(disk(&path))?;
    match entry == kept.entry {
        true => {
            let mut dirs = path.ancestors().skip(1).take_while(|dir| dir.starts_with(coming));
            file.sync_all().and_then(|()| dirs.try_for_each(directory::sync)).map_err(disk(&path))
        }
        false => Err(damaged(format!(
            "downloaded {} bytes with the digest {}; expected {} bytes with the digest {}",
            entry.bytes, entry.blake3, kept.entry.bytes, kept.entry.blake3
        ))),
    }
}

fn create(path: &Path) -> io::Result<File> {
    File::options().read(true).write(true).create_new(true).open(path)
}

fn lock_of(path: &Path) -> io::Result<File> {
    let file = File::options().write(true).create(true).truncate(false).open(path)?;
    // A file system without locks (some network mounts) has none for the run either (`endpoint`).
    let _ = file.lock();
    Ok(file)
}

/// Returns where what lay in these places is now.
fn take_place(coming: &Path, output: &Path) -> io::Result<Option<PathBuf>> {
    let names = fs::read_dir(coming)?.map(|entry| Ok(entry?.file_name())).collect::<io::Result<Vec<_>>>()?;
    let aside = (1u32..).map(|number| output.join(format!("earlier-{number}")));
    let aside = aside.into_iter().find(|aside| !aside.exists());
    let aside = aside.expect("a directory holds fewer than 2^32 others");
    for name in names.iter().map(AsRef::<Path>::as_ref).chain(STATE.map(Path::new)) {
        if output.join(name).exists() {
            fs::create_dir_all(&aside)?;
            fs::rename(output.join(name), aside.join(name))?;
        }
    }
    for name in &names {
        fs::rename(coming.join(name), output.join(name))?;
    }
    fs::remove_dir(coming)?;
    directory::sync(output)?;
    Ok(aside.exists().then_some(aside))
}
