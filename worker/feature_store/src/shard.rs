//! A shard: some records in one file, readable at random, never changed after it is published.
//!
//! ```text
//! header   64 bytes   magic "COXVLPT\0", version u32, dtype u32, width u32, 0 u32, namespace key [32], 0 u64
//! records             each from a multiple of 64: ids u32 x ids, shapes u32 x 3 x shapes, padding to 64,
//!                     values, padding to 64
//! index               56 bytes a record where all have equal counts: key [32], lead [8], values [16];
//!                     80 where they differ: the same, offset u64, then tokens, ids, shapes and 0 as u32
//! footer   80 bytes   index offset u64, records u64, layout u32, tokens u32, ids u32, shapes u32,
//!                     stride u64, squared error f64, squared norm f64 (of what rounding to dtype changed),
//!                     digest [16] of header, index and footer so far, magic "COXVLEND"
//! ```
//!
//! All numbers are little endian. `values` is coded as `codec` says, `tokens * width` of them. Three
//! checksums, all BLAKE3 cut short: the footer's digest is compared when a shard is opened, a record's `lead`
//! (ids and shapes) when it is found, its `values` each time it is read. Both of a record's include its key
//! and counts, so bytes never pass for those of another record. A CRC of 32 bits would take a tenth of the
//! time, and lets one in four thousand million damages pass; this one reads 6 GB/s on a core, several times a
//! disk.

use std::path::{Path, PathBuf};

use coxswain_proto::run_spec::CacheDtype;
use memmap2::Mmap;

use super::{
    codec,
    digest::{Digest, NamespaceKey, SampleKey},
    error::{DamagedRecord, StoreError},
    map,
};

/// A shard of this many bytes should be published: what a crash costs at most, and small enough to sync in
/// under a second.
pub const SHARD_BYTES: u64 = 64 << 20;
/// Version in the header; a reader refuses newer ones.
pub(super) const VERSION: u32 = 1;
pub(super) const HEADER: usize = 64;
pub(super) const FOOTER: usize = 80;
/// Everything of a record starts at a multiple of this.
const ALIGN: usize = 64;
const MAGIC: &[u8; 8] = b"COXVLPT\0";
const END: &[u8; 8] = b"COXVLEND";
const FIXED_ENTRY: usize = 56;
const TABLE_ENTRY: usize = 80;

/// Sizes of one record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Counts {
    /// Feature vectors.
    pub tokens: u32,
    /// Token ids.
    pub ids: u32,
    /// Shapes of images.
    pub shapes: u32,
}

/// One line of the index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub key: SampleKey,
    /// Checksum of ids and shapes.
    pub lead: [u8; 8],
    /// Checksum of the coded values.
    pub values: [u8; 16],
    pub offset: u64,
    pub counts: Counts,
}

/// Sums over a shard of what rounding to the storage dtype has done.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Rounding {
    pub squared_error: f64,
    pub squared_norm: f64,
}

impl Counts {
    fn lead_len(self) -> usize {
        4 * self.ids as usize + 12 * self.shapes as usize
    }

    /// Where the values of a record begin, from its own beginning.
    pub fn values_at(self) -> usize {
        self.lead_len().next_multiple_of(ALIGN)
    }

    /// From the beginning of a record to that of the next. What a file claims and no file can have is
    /// `usize::MAX`.
    pub fn span(self, dtype: CacheDtype, width: usize) -> usize {
        let values = codec::encoded_len(dtype, self.tokens as usize, width);
        self.values_at().saturating_add(values).checked_next_multiple_of(ALIGN).unwrap_or(usize::MAX)
    }
}

impl Rounding {
    /// A share of it.
    pub fn scaled(self, share: f64) -> Self {
        Self { squared_error: self.squared_error * share, squared_norm: self.squared_norm * share }
    }
}

/// Bytes of index and footer at most, for so many records.
pub(super) fn end_len(records: usize) -> usize {
    records * TABLE_ENTRY + FOOTER
}

impl Entry {
    /// Describes a record; `lead` and `values` are its bytes.
    pub fn new(key: SampleKey, offset: u64, counts: Counts, lead: &[u8], values: &[u8]) -> Self {
        let (lead, values) = (checksum(lead, &key, counts), checksum(values, &key, counts));
        Self { key, lead, values, offset, counts }
    }
}

/// `N` bytes of BLAKE3 of a record's bytes, its key and its counts.
fn checksum<const N: usize>(bytes: &[u8], key: &SampleKey, counts: Counts) -> [u8; N] {
    let mut hash = blake3::Hasher::new();
    hash.update(bytes).update(&key.0.0);
    [counts.tokens, counts.ids, counts.shapes].iter().for_each(|n| {
        hash.update(&n.to_le_bytes());
    });
    let mut out = [0; N];
    out.copy_from_slice(&hash.finalize().as_bytes()[..N]);
    out
}

/// The header of a shard.
pub(super) fn header(dtype: CacheDtype, width: u32, namespace: &NamespaceKey) -> [u8; HEADER] {
    let mut bytes = [0; HEADER];
    bytes[..8].copy_from_slice(MAGIC);
    bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
    bytes[12..16].copy_from_slice(&codec::code(dtype).to_le_bytes());
    bytes[16..20].copy_from_slice(&width.to_le_bytes());
    bytes[24..56].copy_from_slice(&namespace.0.0);
    bytes
}

/// Index and footer, to be written after the last record, at offset `at`. `stride` is that of records with
/// `entries[0]`'s counts.
pub(super) fn index_and_footer(
    header: &[u8; HEADER],
    entries: &[Entry],
    at: u64,
    stride: usize,
    rounding: Rounding,
) -> Vec<u8> {
    let first = entries.first().map_or(Counts { tokens: 0, ids: 0, shapes: 0 }, |entry| entry.counts);
    let fixed = entries.iter().all(|entry| entry.counts == first);
    let mut bytes = Vec::with_capacity(entries.len() * TABLE_ENTRY + FOOTER);
    for entry in entries {
        bytes.extend_from_slice(&entry.key.0.0);
        bytes.extend_from_slice(&entry.lead);
        bytes.extend_from_slice(&entry.values);
        if !fixed {
            bytes.extend_from_slice(&entry.offset.to_le_bytes());
            let Counts { tokens, ids, shapes } = entry.counts;
            [tokens, ids, shapes, 0].iter().for_each(|n| bytes.extend_from_slice(&n.to_le_bytes()));
        }
    }
    bytes.extend_from_slice(&at.to_le_bytes());
    bytes.extend_from_slice(&(entries.len() as u64).to_le_bytes());
    let shared = if fixed { first } else { Counts { tokens: 0, ids: 0, shapes: 0 } };
    for n in [u32::from(!fixed), shared.tokens, shared.ids, shared.shapes] {
        bytes.extend_from_slice(&n.to_le_bytes());
    }
    bytes.extend_from_slice(&(if fixed { stride as u64 } else { 0 }).to_le_bytes());
    bytes.extend_from_slice(&rounding.squared_error.to_le_bytes());
    bytes.extend_from_slice(&rounding.squared_norm.to_le_bytes());
    let digest = shard_digest(header, &bytes);
    bytes.extend_from_slice(&digest);
    bytes.extend_from_slice(END);
    bytes
}

/// The digest that a footer has of its shard.
pub(super) fn shard_digest(header: &[u8], index_and_footer: &[u8]) -> [u8; 16] {
    let hash = blake3::Hasher::new().update(header).update(index_and_footer).finalize();
    let mut out = [0; 16];
    out.copy_from_slice(&hash.as_bytes()[..16]);
    out
}

/// A published shard, open for reading.
pub(super) struct Shard {
    pub path: PathBuf,
    map: Mmap,
    dtype: CacheDtype,
    width: usize,
    records: usize,
    index_at: usize,
    /// Counts and stride of all records; none with an offset table.
    fixed: Option<(Counts, usize)>,
    pub rounding: Rounding,
}

impl Shard {
    /// Opens and checks everything but the records.
    pub fn open(
        path: &Path,
        namespace: &NamespaceKey,
        dtype: CacheDtype,
        width: u32,
    ) -> Result<Self, StoreError> {
        let map = map::map(path).map_err(StoreError::io("open", path))?;
        let bytes: &[u8] = &map;
        let damaged = |detail: String| StoreError::Damaged(DamagedRecord::shard(path, detail));
        if bytes.len() < HEADER + FOOTER {
            return Err(damaged(format!("has {} bytes, but a shard needs {}", bytes.len(), HEADER + FOOTER)));
        }
        if &bytes[..8] != MAGIC {
            return Err(damaged(format!("begins with {:02x?} instead of {MAGIC:02x?}", &bytes[..8])));
        }
        let version = u32_at(bytes, 8);
        if version > VERSION {
            let path = path.to_path_buf();
            return Err(StoreError::Newer { path, found: version.into(), known: VERSION });
        }
        let footer_at = bytes.len() - FOOTER;
        let footer = &bytes[footer_at..];
        if &footer[72..] != END {
            let detail = format!("no footer after {} bytes: the shard was truncated", bytes.len());
            return Err(damaged(detail));
        }
        let (index_at, records) = (u64_at(footer, 0), u64_at(footer, 8));
        let entry = if u32_at(footer, 16) == 0 { FIXED_ENTRY } else { TABLE_ENTRY };
        let end = records.checked_mul(entry as u64).and_then(|len| len.checked_add(index_at));
        if end != Some(footer_at as u64) || index_at < HEADER as u64 {
            let detail =
                format!("{records} records with an index at {index_at} do not fit in {} bytes", bytes.len());
            return Err(damaged(detail));
        }
        let index_at = index_at as usize;
        let (found, expected) =
            (&footer[56..72], shard_digest(&bytes[..HEADER], &bytes[index_at..footer_at + 56]));
        if found != expected {
            let detail = format!("index: checksum {}, expected {}", hex(&expected), hex(found));
            return Err(damaged(detail));
        }
        let belongs = bytes[24..56] == namespace.0.0
            && u32_at(bytes, 12) == codec::code(dtype)
            && u32_at(bytes, 16) == width;
        if !belongs {
            let detail = format!("belongs to namespace {}, not to this one; remove it", hex(&bytes[24..40]));
            return Err(StoreError::Foreign { path: path.to_path_buf(), detail });
        }
        let counts =
            Counts { tokens: u32_at(footer, 20), ids: u32_at(footer, 24), shapes: u32_at(footer, 28) };
        let fixed = (entry == FIXED_ENTRY).then(|| (counts, u64_at(footer, 32) as usize));
        let rounding = Rounding { squared_error: f64_at(footer, 40), squared_norm: f64_at(footer, 48) };
        let (path, width, records) = (path.to_path_buf(), width as usize, records as usize);
        Ok(Self { path, map, dtype, width, records, index_at, fixed, rounding })
    }

    /// Records in it.
    pub fn len(&self) -> usize {
        self.records
    }

    /// Bytes of the file.
    pub fn bytes(&self) -> u64 {
        self.map.len() as u64
    }

    /// Values in a token.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Line `record` of the index; it must be below [`len`](Self::len).
    pub fn entry(&self, record: usize) -> Entry {
        let size = if self.fixed.is_some() { FIXED_ENTRY } else { TABLE_ENTRY };
        let line = &self.map[self.index_at + record * size..][..size];
        let (offset, counts) = match self.fixed {
            Some((counts, stride)) => {
                ((HEADER as u64).saturating_add((record as u64).saturating_mul(stride as u64)), counts)
            }
            None => {
                let counts =
                    Counts { tokens: u32_at(line, 64), ids: u32_at(line, 68), shapes: u32_at(line, 72) };
                (u64_at(line, 56), counts)
            }
        };
        let key = SampleKey(Digest(array(line, 0)));
        Entry { key, lead: array(line, 32), values: array(line, 40), offset, counts }
    }

    /// Keys of all records.
    pub fn keys(&self) -> impl Iterator<Item = SampleKey> {
        (0..self.records).map(|record| self.entry(record).key)
    }

    /// Bytes of ids and shapes, after comparing their checksum; begins to bring the whole record into memory.
    pub fn lead(&self, record: usize) -> Result<(Entry, &[u8]), DamagedRecord> {
        let entry = self.entry(record);
        let span = entry.counts.span(self.dtype, self.width);
        let bytes = self.slice(record, entry.offset, span)?;
        map::prefetch(&self.map, entry.offset as usize, span);
        let lead = &bytes[..entry.counts.lead_len()];
        let found: [u8; 8] = checksum(lead, &entry.key, entry.counts);
        match found == entry.lead {
            true => Ok((entry, lead)),
            false => Err(self.mismatch(record, "ids and shapes", &found, &entry.lead)),
        }
    }

    /// Decodes the values of `record` into `out`, which has `tokens * width` elements, after comparing their
    /// checksum.
    pub fn read(&self, record: usize, out: &mut [f32]) -> Result<(), DamagedRecord> {
        let bytes = self.values(record)?;
        codec::decode(self.dtype, self.width, bytes, out);
        Ok(())
    }

    /// A record's line of the index and all its bytes, padding included, after comparing both of its
    /// checksums.
    pub fn sound(&self, record: usize) -> Result<(Entry, &[u8]), DamagedRecord> {
        let (entry, _) = self.lead(record)?;
        self.values(record)?;
        let bytes = self.slice(record, entry.offset, entry.counts.span(self.dtype, self.width))?;
        Ok((entry, bytes))
    }

    /// The coded values of `record`, after comparing their checksum.
    pub fn values(&self, record: usize) -> Result<&[u8], DamagedRecord> {
        let entry = self.entry(record);
        let at = entry.offset.saturating_add(entry.counts.values_at() as u64);
        let len = codec::encoded_len(self.dtype, entry.counts.tokens as usize, self.width);
        let bytes = self.slice(record, at, len)?;
        let found: [u8; 16] = checksum(bytes, &entry.key, entry.counts);
        match found == entry.values {
            true => Ok(bytes),
            false => Err(self.mismatch(record, "values", &found, &entry.values)),
        }
    }

    fn slice(&self, record: usize, at: u64, len: usize) -> Result<&[u8], DamagedRecord> {
        let end = at.checked_add(len as u64).filter(|end| *end <= self.index_at as u64);
        end.map(|end| &self.map[at as usize..end as usize]).ok_or_else(|| {
            let detail = format!("its {len} bytes at {at} overlap the index at byte {}", self.index_at);
            DamagedRecord::record(&self.path, record, detail)
        })
    }

    fn mismatch(&self, record: usize, what: &str, found: &[u8], expected: &[u8]) -> DamagedRecord {
        let detail = format!("{what}: checksum {}, expected {}", hex(found), hex(expected));
        DamagedRecord::record(&self.path, record, detail)
    }
}

/// Ids and shapes of a record, from its lead.
pub(super) fn split_lead(counts: Counts, lead: &[u8]) -> (Vec<u32>, Vec<[u32; 3]>) {
    let words: Vec<u32> = lead.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word)).collect();
    let (ids, shapes) = words.split_at(counts.ids as usize);
    (ids.to_vec(), shapes.as_chunks::<3>().0.to_vec())
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(&bytes[at..at + N]);
    out
}
fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(array(bytes, at))
}
fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(array(bytes, at))
}
fn f64_at(bytes: &[u8], at: usize) -> f64 {
    f64::from_le_bytes(array(bytes, at))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::{super::digest::Digest, *};

    /// Opens a shard that is what its digest says, and says what cannot be.
    fn forged(dtype: CacheDtype, entries: &[Entry], stride: usize) -> Result<Shard, StoreError> {
        let namespace = NamespaceKey(Digest([7; 32]));
        let width = 1 << 31;
        let mut bytes = header(dtype, width, &namespace).to_vec();
        bytes.extend_from_slice(&[0; ALIGN]);
        let start: [u8; HEADER] = array(&bytes, 0);
        let at = bytes.len() as u64;
        bytes.extend_from_slice(&index_and_footer(&start, entries, at, stride, Rounding::default()));
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("shard");
        std::fs::write(&path, bytes).expect("a file");
        Shard::open(&path, &namespace, dtype, width)
    }

    #[test]
    fn a_forged_index_is_damage_and_no_panic() {
        let most = Counts { tokens: u32::MAX, ids: u32::MAX, shapes: u32::MAX };
        // As float32 its values have 2^64 bytes.
        let wraps = Counts { tokens: 1 << 31, ids: 3, shapes: 0 };
        let entry = |counts, offset| Entry::new(SampleKey(Digest([1; 32])), offset, counts, &[], &[]);
        for dtype in [CacheDtype::Float32, CacheDtype::Bfloat16, CacheDtype::Int8] {
            for counts in [most, wraps] {
                for entries in [
                    vec![entry(counts, 0); 3],
                    vec![entry(counts, u64::MAX - 7), entry(Counts { shapes: 1, ..counts }, u64::MAX)],
                ] {
                    let shard = forged(dtype, &entries, usize::MAX).expect("its digest is right");
                    for record in 0..shard.len() {
                        assert!(shard.lead(record).is_err() && shard.values(record).is_err(), "{counts:?}");
                        assert!(shard.sound(record).is_err(), "{counts:?}");
                    }
                }
            }
        }
    }
}
