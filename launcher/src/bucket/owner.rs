//! A launch that has a run's place in a bucket, and the order in which it writes.
//!
//! ```text
//! take    index, if it is still the one that was read          ── from here on the run is this launch's
//! keep    files of the set, each under a name of its own
//!         index, if it is still ours                            ── from here on the set is there
//!         objects that no set needs any more are removed
//! leave   results, index
//! ```
//!
//! After any of these writes the index names sets whose objects are all there. Another launch that takes
//! the run changes the index, so that every later write of ours to it is refused: the last launch counts,
//! as it does where a scheduler starts a job again whose machine it has given up.

use std::{
    fs::File,
    sync::{Mutex, PoisonError},
};

use coxswain_proto::run_spec::RunSpec;
use coxswain_remote::{Storage, StorageError, Version};
use coxswain_worker::train::checkpoint::FileEntry;

use super::{
    error::BucketError,
    index::{INDEX, Index, SETS, Set, Upload, place},
};
use crate::clock;

/// Files that are written or brought at the same time.
pub const AT_ONCE: usize = 4;
/// Attempts at an index that somebody else writes at the same moment.
const TRIES: usize = 4;

/// A file that is to go to the bucket, open so that it stays what it is.
pub struct OpenFile {
    /// Relative to the output directory.
    pub path: String,
    /// Content.
    pub file: File,
    /// Length and digest.
    pub entry: FileEntry,
}

/// The index as it was read or written last.
#[derive(Clone, Debug)]
pub struct IndexSnapshot {
    /// What it says.
    pub index: Index,
    /// Version of its object; absent where there is none.
    pub version: Option<Version>,
}

/// A launch with a run in a bucket.
pub struct Owner {
    storage: Box<dyn Storage>,
    address: String,
    known: IndexSnapshot,
    /// Whether the bucket's index may be another one: a write of it has not been answered.
    is_unsure: bool,
    /// Sets that this launch has begun.
    begun: u64,
    /// Whether a set was given up, of which objects may lie there.
    has_leftovers: bool,
}

/// What the bucket has of a run; an empty index where it has nothing.
pub fn look(storage: &dyn Storage, address: &str, spec: &RunSpec) -> Result<IndexSnapshot, BucketError> {
    let Some((bytes, version)) = storage.get(INDEX)? else {
        return Ok(IndexSnapshot { index: Index::new(spec), version: None });
    };
    let foreign = |foreign| BucketError::Foreign { address: address.to_owned(), foreign };
    Ok(IndexSnapshot { index: Index::parse(&bytes).map_err(foreign)?, version: Some(version) })
}

impl Owner {
    /// Takes the run for this launch. Fails where the bucket cannot be written, so that one finds out before
    /// anything runs.
    pub fn claim(
        storage: Box<dyn Storage>,
        address: &str,
        spec: &RunSpec,
        launcher: &str,
    ) -> Result<Self, BucketError> {
        for _ in 0..TRIES {
            let known = look(&*storage, address, spec)?;
            let foreign = |foreign| BucketError::Foreign { address: address.to_owned(), foreign };
            known.index.must_be_of(spec).map_err(foreign)?;
            let is_ours = known.index.launcher == launcher;
            let index = match is_ours {
                // An attempt whose answer was lost.
                true => known.index,
                false => known.index.taken(spec, launcher, clock::since_epoch().as_secs()),
            };
            let version = match is_ours {
                true => known.version,
                false => storage.swap(INDEX, &index.bytes(), known.version.as_ref())?,
            };
            if let Some(version) = version {
                heeds_conditions(&*storage, address, &index)?;
                let known = IndexSnapshot { index, version: Some(version) };
                let owner = Self {
                    storage,
                    address: address.to_owned(),
                    known,
                    is_unsure: false,
                    begun: 0,
                    has_leftovers: false,
                };
                owner.sweep();
                return Ok(owner);
            }
        }
        Err(superseded(address, &look(&*storage, address, spec)?.index))
    }

    /// What the bucket has.
    pub fn index(&self) -> &Index {
        &self.known.index
    }

    /// Keeps a set, and no more than `keep` of them.
    pub fn keep(&mut self, step: u64, sources: &[OpenFile], keep: usize) -> Result<(), BucketError> {
        self.settle()?;
        self.begun += 1;
        let place = place(self.known.index.launch, self.begun);
        let object = |source: &OpenFile| match self.known.index.object_of(&source.path, &source.entry) {
            Some(object) => object.to_owned(),
            None => format!("{place}/{}", source.path),
        };
        let had_leftovers = std::mem::replace(&mut self.has_leftovers, true);
        let files = self.upload(sources, object)?;
        self.write(self.known.index.with(Set { step, files }, keep))?;
        self.has_leftovers = false;
        if had_leftovers {
            self.sweep();
        }
        Ok(())
    }

    /// Keeps what the run has left, under its own names.
    pub fn leave(&mut self, results: &[OpenFile]) -> Result<(), BucketError> {
        self.settle()?;
        let results = self.upload(results, |source| source.path.clone())?;
        let index = self.known.index.leaving(results);
        self.write(index)
    }

    /// Uploads what is not there yet.
    fn upload(
        &self,
        sources: &[OpenFile],
        object: impl Fn(&OpenFile) -> String,
    ) -> Result<Vec<Upload>, BucketError> {
        let kept: Vec<_> = sources
            .iter()
            .map(|source| Upload {
                path: source.path.clone(),
                object: object(source),
                entry: source.entry.clone(),
            })
            .collect();
        let missing: Vec<_> = sources
            .iter()
            .zip(&kept)
            .filter(|(source, kept)| {
                self.known.index.object_of(&source.path, &source.entry) != Some(&kept.object)
            })
            .collect();
        side_by_side(&missing, |(source, kept)| {
            self.storage.upload(&kept.object, &source.file, source.entry.bytes)
        })?;
        Ok(kept)
    }

    /// Writes the index, if the run is still ours, and removes what it no longer names.
    fn write(&mut self, index: Index) -> Result<(), BucketError> {
        let bytes = index.bytes();
        for _ in 0..TRIES {
            self.is_unsure = true;
            let written = self.storage.swap(INDEX, &bytes, self.known.version.as_ref())?;
            if written.is_some() {
                self.is_unsure = false;
                let before = std::mem::replace(&mut self.known, IndexSnapshot { index, version: written });
                self.remove_of(&before.index);
                return Ok(());
            }
            if self.look_again()? && self.known.index.bytes() == bytes {
                // Written by an attempt whose answer was lost.
                self.sweep();
                return Ok(());
            }
        }
        let fault = "another program keeps overwriting it".to_owned();
        let object = format!("{}/{INDEX}", self.address);
        Err(StorageError { object, fault, of_object: true }.into())
    }

    /// Finds out what the bucket has, where that is not known.
    fn settle(&mut self) -> Result<(), BucketError> {
        if self.is_unsure { self.look_again().map(drop) } else { Ok(()) }
    }

    /// Reads the index, if the run is still ours. False if there is none.
    fn look_again(&mut self) -> Result<bool, BucketError> {
        let Some((bytes, version)) = self.storage.get(INDEX)? else { return Ok(false) };
        let foreign = |foreign| BucketError::Foreign { address: self.address.clone(), foreign };
        let index = Index::parse(&bytes).map_err(foreign)?;
        if index.launcher != self.known.index.launcher {
            return Err(superseded(&self.address, &index));
        }
        self.known = IndexSnapshot { index, version: Some(version) };
        self.is_unsure = false;
        Ok(true)
    }

    fn remove_of(&self, before: &Index) {
        let objects = before.sets.iter().flat_map(|set| &set.files).map(|kept| &kept.object);
        let gone: Vec<_> = objects.filter(|object| !self.known.index.needs(object)).collect();
        self.remove(&gone);
    }

    /// Removes what this launch and those before it have left unfinished; not what one has begun that took
    /// the run a moment ago.
    pub(super) fn sweep(&self) {
        let later = place(self.known.index.launch + 1, 0);
        match self.storage.list(SETS) {
            Ok(objects) => {
                let of_nobody = |object: &&String| **object < later && !self.known.index.needs(object);
                self.remove(&objects.iter().filter(of_nobody).collect::<Vec<_>>());
            }
            Err(error) => tracing::warn!(%error, "cannot remove unfinished uploads"),
        }
    }

    fn remove(&self, objects: &[&String]) {
        // They take room, and nothing depends on them: the next launch tries again.
        if let Err(error) = side_by_side(objects, |object| self.storage.remove(object)) {
            tracing::warn!(%error, "cannot remove an object that is no longer needed");
        }
    }
}

/// Tries to make the index that is there: a server that does so knows no conditions, and would let two
/// launches have one run.
fn heeds_conditions(storage: &dyn Storage, address: &str, index: &Index) -> Result<(), BucketError> {
    match storage.swap(INDEX, &index.bytes(), None)? {
        None => Ok(()),
        Some(_) => {
            let fault = "the server ignores If-None-Match when it writes an object, so two launches could \
                         own one run: use a server with conditional writes";
            Err(StorageError { object: address.to_owned(), fault: fault.to_owned(), of_object: false }.into())
        }
    }
}

fn superseded(address: &str, theirs: &Index) -> BucketError {
    let ago = clock::since_epoch().as_secs().saturating_sub(theirs.since);
    BucketError::Superseded { address: address.to_owned(), launcher: theirs.launcher.clone(), ago }
}

/// Does something with each of `all`, a few at a time; the first error ends it.
pub fn side_by_side<T: Sync, E: Send>(all: &[T], act: impl Fn(&T) -> Result<(), E> + Sync) -> Result<(), E> {
    let next = Mutex::new(all.iter());
    let failed = Mutex::new(None);
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE.min(all.len()) {
            scope.spawn(|| {
                loop {
                    let Some(one) = next.lock().unwrap_or_else(PoisonError::into_inner).next() else {
                        return;
                    };
                    if let Err(error) = act(one) {
                        failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
                        // Nobody begins another one.
                        next.lock().unwrap_or_else(PoisonError::into_inner).by_ref().for_each(drop);
                    }
                }
            });
        }
    });
    failed.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
}
