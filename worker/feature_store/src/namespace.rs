//! A namespace: the records that share everything but the sample, found by the sample's key.
//!
//! The index is in memory, made of the shards' own indices: 47 to 94 bytes a record. Threads share a
//! namespace by cloning it; a look-up takes a read lock for the time of a hash-table access. Shards that
//! other processes publish are seen after [`Namespace::refresh`].
//!
//! A damaged record leaves the index when it is met, and another copy of it takes its place if there is one;
//! otherwise it is a miss, is computed again, and stored in a newer shard, which wins over the old one from
//! then on.

use std::{
    collections::{HashMap, HashSet},
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
    sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard},
    time::{Duration, SystemTime},
};

use super::{
    clock,
    digest::{NamespaceKey, SampleKey},
    directory::Directory,
    error::{DamagedRecord, StoreError},
    namespace_file::NamespaceDescription,
    shard::{self, Counts, Shard},
    usage::InUse,
};

/// A directory that changed less than this ago may change again without its time showing it.
const TIME_RESOLUTION: Duration = Duration::from_secs(2);
/// Damages kept for [`Namespace::damaged`]; all are counted and logged.
const DAMAGES_KEPT: usize = 64;

/// Records of one kind, open for reading and writing. Cheap to clone; in use until the last clone, record and
/// writer are gone.
#[derive(Clone)]
pub struct Namespace(pub(super) Arc<NamespaceState>);

/// What clones of a namespace share.
pub(super) struct NamespaceState {
    pub dir: PathBuf,
    pub key: NamespaceKey,
    pub description: NamespaceDescription,
    pub store: Directory,
    index: RwLock<Index>,
    /// Keeps evictors out.
    _in_use: InUse,
}

/// Shard and record.
type Place = (u32, u32);

#[derive(Default)]
struct Index {
    shards: Vec<Arc<Shard>>,
    places: HashMap<SampleKey, Place>,
    /// Names of all shards looked at, those that can never be used included.
    seen: HashSet<OsString>,
    /// Names of shards that could not be read, and are tried again.
    unread: HashSet<OsString>,
    /// Records found damaged.
    bad: HashSet<Place>,
    damages: Vec<DamagedRecord>,
    damaged: u64,
    /// The directory's time when it was last read; none if that may not be relied on.
    read_at: Option<SystemTime>,
}

/// A record that is there. Its ids and shapes have been verified; its values are when they are read.
pub struct RecordRef {
    namespace: Arc<NamespaceState>,
    shard: Arc<Shard>,
    place: Place,
    key: SampleKey,
    counts: Counts,
    ids: Vec<u32>,
    shapes: Vec<[u32; 3]>,
}

impl Namespace {
    pub(super) fn open_in(
        store: Directory,
        dir: PathBuf,
        description: NamespaceDescription,
        in_use: InUse,
    ) -> Result<Self, StoreError> {
        let (key, index) = (description.key(), RwLock::default());
        let namespace =
            Self(Arc::new(NamespaceState { dir, key, description, store, index, _in_use: in_use }));
        namespace.refresh()?;
        Ok(namespace)
    }

    /// The namespace's name, as it stands in leases.
    pub fn key(&self) -> NamespaceKey {
        self.0.key
    }

    /// What its records share.
    pub fn description(&self) -> &NamespaceDescription {
        &self.0.description
    }

    /// Directory.
    pub fn dir(&self) -> &Path {
        &self.0.dir
    }

    /// The record of a sample, if there is an undamaged one.
    pub fn get(&self, key: &SampleKey) -> Option<RecordRef> {
        loop {
            let (place, shard) = self.0.find(key)?;
            let damage = match shard.lead(place.1 as usize) {
                Ok((entry, lead)) => {
                    let counts = entry.counts;
                    let (ids, shapes) = shard::split_lead(counts, lead);
                    let namespace = self.0.clone();
                    let shard = shard.clone();
                    return Some(RecordRef { namespace, shard, place, key: *key, counts, ids, shapes });
                }
                Err(damage) => damage,
            };
            self.0.forget(key, place, &damage);
        }
    }

    /// Whether a record of this sample is known. It is not read, so it may still turn out to be damaged.
    pub fn contains(&self, key: &SampleKey) -> bool {
        self.0.holds(key)
    }

    /// Samples known.
    pub fn known(&self) -> usize {
        self.0.read().places.len()
    }

    /// Bytes of memory that the index takes.
    pub fn index_bytes(&self) -> u64 {
        index_bytes(self.0.read().places.capacity() as u64)
    }

    /// Bytes of all shards known.
    pub fn bytes(&self) -> u64 {
        self.0.read().shards.iter().map(|shard| shard.bytes()).sum()
    }

    /// Relative L2 error that rounding to the storage dtype has made, over all records known; 0 for float32.
    pub fn rounding_error(&self) -> f64 {
        let index = self.0.read();
        let (error, norm) = index.shards.iter().fold((0.0, 0.0), |(error, norm), shard| {
            (error + shard.rounding.squared_error, norm + shard.rounding.squared_norm)
        });
        if norm > 0.0 { (error / norm).sqrt() } else { 0.0 }
    }

    /// Damages met so far: how many, and the first of them.
    pub fn damaged(&self) -> (u64, Vec<DamagedRecord>) {
        let index = self.0.read();
        (index.damaged, index.damages.clone())
    }

    /// Takes in shards that others have published since; returns how many. One call to the system if there
    /// are none.
    pub fn refresh(&self) -> Result<usize, StoreError> {
        self.0.refresh()
    }
}

/// Bytes of memory that an index of so many records takes: a hash table is at most seven eighths full, and a
/// power of two of slots.
pub fn index_bytes(records: u64) -> u64 {
    const SLOT: u64 = size_of::<(SampleKey, Place)>() as u64 + 1;
    match records {
        0 => 0,
        _ => (records * 8).div_ceil(7).next_power_of_two() * SLOT,
    }
}

impl NamespaceState {
    /// Whether a record of this sample is known.
    pub fn holds(&self, key: &SampleKey) -> bool {
        self.read().places.contains_key(key)
    }

    /// Adds a published shard of our own.
    pub fn admit(&self, path: &Path) -> Result<(), StoreError> {
        let shard = Shard::open(path, &self.key, self.description.dtype, self.description.width)?;
        let mut index = self.write();
        index.seen.insert(path.file_name().unwrap_or_default().to_owned());
        index.add(shard);
        Ok(())
    }

    fn find(&self, key: &SampleKey) -> Option<(Place, Arc<Shard>)> {
        let index = self.read();
        let place = *index.places.get(key)?;
        Some((place, index.shards[place.0 as usize].clone()))
    }

    fn refresh(&self) -> Result<usize, StoreError> {
        let metadata = fs::metadata(&self.dir).and_then(|metadata| metadata.modified());
        let changed = metadata.map_err(StoreError::io("read", &self.dir))?;
        if self.read().read_at == Some(changed) {
            return Ok(0);
        }
        let names = shard_names(&self.dir)?;
        let new: Vec<_> = {
            let index = self.read();
            names.into_iter().filter(|name| !index.seen.contains(name)).collect()
        };
        let mut opened = Vec::new();
        for name in new {
            let path = self.dir.join(&name);
            opened
                .push((name, Shard::open(&path, &self.key, self.description.dtype, self.description.width)));
        }
        let mut index = self.write();
        let (mut added, mut complete) = (0, true);
        for (name, shard) in opened {
            match index.take(name, shard) {
                Some(new) => added += usize::from(new),
                None => complete = false,
            }
        }
        let settled = clock::file_time().duration_since(changed).is_ok_and(|age| age > TIME_RESOLUTION);
        index.read_at = (settled && complete).then_some(changed);
        Ok(added)
    }

    /// Takes a damaged record out of the index, in favour of another copy if there is one.
    fn forget(&self, key: &SampleKey, place: Place, damage: &DamagedRecord) {
        let mut index = self.write();
        if !index.bad.insert(place) {
            return;
        }
        index.note(damage);
        tracing::warn!(%damage, "a record of the cache is damaged");
        if index.places.get(key) != Some(&place) {
            return;
        }
        match index.another(key) {
            Some(other) => index.places.insert(*key, other),
            None => index.places.remove(key),
        };
    }

    fn read(&self) -> RwLockReadGuard<'_, Index> {
        // A thread that panicked while it held the lock left a consistent index: insertions are single steps.
        self.index.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Index> {
        self.index.write().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Index {
    /// Takes in what opening a shard has given; true if its records are new, none if it should be tried
    /// again.
    fn take(&mut self, name: OsString, shard: Result<Shard, StoreError>) -> Option<bool> {
        if self.seen.contains(&name) {
            // Another thread was faster.
            return Some(false);
        }
        match shard {
            Ok(shard) => self.add(shard),
            // Removed since the directory was read.
            Err(error) if error.is_gone() => return Some(false),
            Err(error @ (StoreError::Io { .. } | StoreError::Full { .. })) => {
                if self.unread.insert(name) {
                    tracing::warn!(%error, "a shard of the cache cannot be read; it will be retried");
                }
                return None;
            }
            Err(error) => {
                let advice = match error {
                    StoreError::Newer { .. } => "",
                    _ => "; `cox cache gc` removes it",
                };
                tracing::warn!(%error, "a shard of the cache cannot be used{advice}");
                if let StoreError::Damaged(damage) = error {
                    self.note(&damage);
                }
                self.seen.insert(name);
                return Some(false);
            }
        }
        self.unread.remove(&name);
        Some(self.seen.insert(name))
    }

    /// Newer shards are added later and win.
    fn add(&mut self, shard: Shard) {
        let number = self.shards.len() as u32;
        self.places.reserve(shard.len());
        for record in 0..shard.len() {
            self.places.insert(shard.entry(record).key, (number, record as u32));
        }
        self.shards.push(Arc::new(shard));
    }

    fn note(&mut self, damage: &DamagedRecord) {
        self.damaged += 1;
        if self.damages.len() < DAMAGES_KEPT {
            self.damages.push(damage.clone());
        }
    }

    /// Another copy of a record, in the newest shard that has one.
    fn another(&self, key: &SampleKey) -> Option<Place> {
        self.shards.iter().enumerate().rev().find_map(|(number, shard)| {
            let mut records = (0..shard.len()).map(|record| (number as u32, record as u32));
            records.find(|place| shard.entry(place.1 as usize).key == *key && !self.bad.contains(place))
        })
    }
}

impl RecordRef {
    /// Feature vectors.
    pub fn tokens(&self) -> usize {
        self.counts.tokens as usize
    }

    /// Values of one feature vector.
    pub fn width(&self) -> usize {
        self.shard.width()
    }

    /// Prompt with image placeholders expanded.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// `(t, h, w)` in patches, one per image.
    pub fn shapes(&self) -> &[[u32; 3]] {
        &self.shapes
    }

    /// Reads the values into `out`, `[tokens, width]` row-major, after verifying them. Damaged values leave
    /// the index, so that asking the namespace again finds another copy or a miss; `out` is then untouched.
    ///
    /// # Panics
    /// If `out` has not `tokens * width` elements.
    pub fn read_f32(&self, out: &mut [f32]) -> Result<(), DamagedRecord> {
        assert_eq!(out.len(), self.tokens() * self.width(), "`out` must have tokens * width elements");
        self.shard.read(self.place.1 as usize, out).inspect_err(|damage| {
            self.namespace.forget(&self.key, self.place, damage);
        })
    }
}

/// Names of the shards in a directory, oldest first: names begin with the time.
pub(super) fn shard_names(dir: &Path) -> Result<Vec<OsString>, StoreError> {
    let mut names = Vec::new();
    for entry in fs::read_dir(dir).map_err(StoreError::io("read", dir))? {
        let name = entry.map_err(StoreError::io("read", dir))?.file_name();
        if name.to_str().is_some_and(|name| name.starts_with("part-") && name.ends_with(".vlc")) {
            names.push(name);
        }
    }
    names.sort_unstable();
    Ok(names)
}
