//! One object: bytes by range, out of blocks that are brought once and read from the local disk from then on.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    io,
    ops::Range,
    os::unix::fs::FileExt,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use bytes::Bytes;
use object_store::{Error, GetOptions, GetRange, ObjectMeta, path::Path};
use tokio::sync::{OnceCell, Semaphore};

use crate::{
    bucket::Bucket,
    cache::{Cache, Key},
    clock,
    error::RemoteError,
    waiting::wait,
};

/// Bytes of a block. At 50 ms a request, sixteen at once bring 300 MB a second; and no more than this is
/// brought for a row that is read alone.
pub const BLOCK_BYTES: u64 = 1 << 20;
/// How long a block is not marked as used again: marking writes to the disk, and what makes way for others
/// has lain there for hours.
const MARKED_FOR: Duration = Duration::from_secs(60);
/// Requests of a process under way at once.
const REQUESTS: usize = 32;

static PERMITS: Semaphore = Semaphore::const_new(REQUESTS);

/// What an object was when it was first seen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectStamp {
    /// Length in bytes.
    pub len: u64,
    /// Entity tag; where the server gives none, when it was changed.
    pub version: String,
    /// Whether that is a tag that a request can insist on.
    tagged: bool,
}

impl ObjectStamp {
    pub fn of(meta: &ObjectMeta) -> Self {
        // Azure names a tag without its quotation marks where it lists, and with them where it answers.
        let quoted = |tag: &String| if tag.ends_with('"') { tag.clone() } else { format!("\"{tag}\"") };
        let tag = meta.e_tag.as_ref().map(quoted);
        // A weak tag never matches (RFC 9110, 13.1.1).
        let tagged = tag.as_ref().is_some_and(|tag| !tag.starts_with("W/"));
        let version = tag.unwrap_or_else(|| meta.last_modified.timestamp_millis().to_string());
        Self { len: meta.size, version, tagged }
    }
}

/// An object that can be read.
#[derive(Debug)]
pub struct Object {
    bucket: Arc<Bucket>,
    path: Path,
    seen: ObjectStamp,
    key: Key,
    cache: Arc<Cache>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Blocks that this process has compared with their digests, and when it last marked them as used.
    checked: BTreeMap<u64, Instant>,
    /// Blocks that are under way, for all who want them.
    coming: HashMap<u64, Arc<OnceCell<Result<Bytes, RemoteError>>>>,
}

impl Object {
    pub(crate) fn new(bucket: Arc<Bucket>, path: Path, seen: ObjectStamp, cache: Arc<Cache>) -> Self {
        let key = Key::new(&format!("{}/{path}", bucket.origin), &seen.version, seen.len);
        Self { bucket, path, seen, key, cache, state: Mutex::default() }
    }

    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.seen.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Fills `buffer` from `offset`. Bytes beyond the end are an error of the kind
    /// [`UnexpectedEof`](io::ErrorKind::UnexpectedEof); what is wrong with the object itself is a
    /// [`RemoteError`] within.
    pub fn read_at(self: &Arc<Self>, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        let end = offset.checked_add(buffer.len() as u64).filter(|end| *end <= self.len());
        let end = end.ok_or(io::ErrorKind::UnexpectedEof)?;
        let wanted = blocks(&(offset..end));
        if wanted.end - wanted.start > 1 {
            // A page of images may have tens of blocks: side by side, and not one after the other.
            self.bring(std::slice::from_ref(&(offset..end))).map_err(io::Error::other)?;
        }
        let mut rest = buffer;
        for block in wanted {
            let range = self.range(block);
            let (from, to) = (offset.max(range.start), end.min(range.end));
            let (mine, others) = rest.split_at_mut((to - from) as usize);
            rest = others;
            let kept = self.kept(block).map(|file| file.read_exact_at(mine, from - range.start));
            if !matches!(kept, Some(Ok(()))) {
                let object = self.clone();
                let bytes = wait(async move { object.fetched(block).await }).map_err(io::Error::other)?;
                let at = (from - range.start) as usize;
                mine.copy_from_slice(&bytes[at..at + mine.len()]);
            }
        }
        Ok(())
    }

    /// Brings the blocks of these ranges that are not on the local disk, all at once, and waits for them.
    pub fn bring(self: &Arc<Self>, ranges: &[Range<u64>]) -> Result<(), RemoteError> {
        let within = ranges.iter().map(|range| range.start..range.end.min(self.len()));
        let wanted: BTreeSet<u64> = within.flat_map(|range| blocks(&range)).collect();
        // One that was marked just now is there, or else brought when it is read.
        let there = |block: &u64| self.marked(*block) == Some(true) || self.kept(*block).is_some();
        let missing: Vec<u64> = wanted.into_iter().filter(|block| !there(block)).collect();
        if missing.is_empty() {
            return Ok(());
        }
        let object = self.clone();
        wait(async move {
            let fetches = missing.into_iter().map(|block| {
                let object = object.clone();
                tokio::spawn(async move { object.fetched(block).await.map(drop) })
            });
            // All are started before the first is waited for.
            for fetch in fetches.collect::<Vec<_>>() {
                fetch.await.map_err(|error| RemoteError::Refused(error.to_string()))??;
            }
            Ok(())
        })
    }

    /// What tells it from what it was before: its entity tag, or when it was changed.
    pub(crate) fn version(&self) -> &str {
        &self.seen.version
    }

    /// Names its content, wherever its bytes are.
    pub(crate) fn key(&self) -> Key {
        self.key
    }

    /// The bytes of a range from the bucket, in pieces, of which none is kept on the local disk; all are
    /// asked for at once, and none is under way any more when one has failed.
    pub(crate) fn pieces(self: &Arc<Self>, range: Range<u64>) -> Result<Vec<Bytes>, RemoteError> {
        let object = self.clone();
        wait(async move {
            let pieces = blocks(&range).map(|block| {
                let (of, object) = (object.range(block), object.clone());
                let piece = of.start.max(range.start)..of.end.min(range.end);
                tokio::spawn(async move { object.brought(piece).await })
            });
            let mut all = Vec::new();
            for piece in pieces.collect::<Vec<_>>() {
                all.push(piece.await.unwrap_or_else(|error| Err(RemoteError::Refused(error.to_string()))));
            }
            all.into_iter().collect()
        })
    }

    /// Where a block lies in the object.
    fn range(&self, block: u64) -> Range<u64> {
        block * BLOCK_BYTES..((block + 1) * BLOCK_BYTES).min(self.len())
    }

    /// Whether a block was marked as used just now; none if it was never compared with its digest.
    fn marked(&self, block: u64) -> Option<bool> {
        self.lock().checked.get(&block).map(|marked| clock::now() - *marked < MARKED_FOR)
    }

    /// A block that is on the local disk, and is what it was when it was brought.
    fn kept(&self, block: u64) -> Option<std::fs::File> {
        let (range, marked) = (self.range(block), self.marked(block));
        let file = match marked {
            Some(true) => self.cache.open_block(self.key, block),
            _ => self.cache.get(self.key, block, (range.end - range.start) as usize, marked.is_none()),
        };
        if file.is_none() {
            self.lock().checked.remove(&block);
        } else if marked != Some(true) {
            self.lock().checked.insert(block, clock::now());
        }
        file
    }

    /// A block from the bucket; callers of the same block share one request.
    async fn fetched(&self, block: u64) -> Result<Bytes, RemoteError> {
        let cell = self.lock().coming.entry(block).or_default().clone();
        let fetched = cell.get_or_init(|| self.fetch(block)).await.clone();
        self.lock().coming.remove(&block);
        fetched
    }

    async fn fetch(&self, block: u64) -> Result<Bytes, RemoteError> {
        let bytes = self.brought(self.range(block)).await?;
        if let Err(error) = self.cache.put(self.key, block, &bytes) {
            // A full disk costs time, not the run.
            static REPORTED: AtomicBool = AtomicBool::new(false);
            if !REPORTED.swap(true, Ordering::Relaxed) {
                tracing::warn!(%error, "blocks of buckets cannot be cached on the local disk and are downloaded each time: make room, or name another directory (data.bucket_cache.dir)");
            }
        } else {
            self.lock().checked.insert(block, clock::now());
        }
        Ok(bytes)
    }

    async fn brought(&self, range: Range<u64>) -> Result<Bytes, RemoteError> {
        let _permit = PERMITS.acquire().await.map_err(|error| RemoteError::Refused(error.to_string()))?;
        self.bucket.persist(|| self.request(range.clone())).await
    }

    async fn request(&self, range: Range<u64>) -> Result<Bytes, Error> {
        let wanted = (range.end - range.start) as usize;
        let options = GetOptions {
            if_match: self.seen.tagged.then(|| self.seen.version.clone()),
            range: Some(GetRange::Bounded(range)),
            ..GetOptions::default()
        };
        let result = self.bucket.store.get_opts(&self.path, options).await?;
        let now = ObjectStamp::of(&result.meta);
        if now != self.seen {
            let found = format!("{} bytes, version {}", now.len, now.version);
            return Err(Error::Precondition { path: self.path.to_string(), source: found.into() });
        }
        let bytes = result.bytes().await?;
        match bytes.len() == wanted {
            true => Ok(bytes),
            false => {
                let source = format!("{} bytes instead of the {wanted} requested", bytes.len()).into();
                Err(Error::Generic { store: "range", source })
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Whole after each statement.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The numbers of the blocks that a range touches.
fn blocks(range: &Range<u64>) -> Range<u64> {
    match range.is_empty() {
        true => 0..0,
        false => range.start / BLOCK_BYTES..(range.end - 1) / BLOCK_BYTES + 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tag_is_the_same_with_quotation_marks_and_without() {
        let seen = |tag: &str| {
            ObjectStamp::of(&ObjectMeta {
                location: "a".into(),
                last_modified: Default::default(),
                size: 1,
                e_tag: Some(tag.into()),
                version: None,
            })
        };
        assert_eq!(seen("0x8DE"), seen("\"0x8DE\""));
        assert_eq!(seen("0x8DE").version, "\"0x8DE\"", "as requests are to name it");
        assert!(!seen("W/\"1\"").tagged && seen("\"1\"").tagged);
    }

    #[test]
    fn a_range_touches_the_blocks_that_hold_it() {
        assert_eq!(blocks(&(5..5)), 0..0);
        assert_eq!(blocks(&(0..1)), 0..1);
        assert_eq!(blocks(&(BLOCK_BYTES - 1..BLOCK_BYTES)), 0..1);
        assert_eq!(blocks(&(BLOCK_BYTES - 1..BLOCK_BYTES + 1)), 0..2);
    }
}
