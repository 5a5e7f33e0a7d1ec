//! Writing a shard: append records, then publish all of them at once.
//!
//! ```text
//! open-<unique>.tmp, locked ── append, append, .. ── index, footer, fsync, rename,
//!                                                        fsync of the directory ─▶ part-<unique>.vlc
//! ```
//!
//! A writer that dies leaves a file no reader opens; its lock died with it, which is how `gc` knows. Dropping
//! a writer without publishing removes the file. Errors leave what is published as it is.

use std::{
    collections::HashSet,
    fs::{self, File},
    io::{BufWriter, Write},
    path::PathBuf,
    sync::Arc,
};

use super::{
    codec,
    digest::SampleKey,
    error::StoreError,
    namespace::{Namespace, NamespaceState},
    namespace_file,
    shard::{self, Counts, Entry, HEADER, Rounding, SHARD_BYTES},
    usage,
};
use coxswain_nn::pulse;

/// Records reach the system in writes of this size.
const BUFFER: usize = 1 << 20;

/// One sample's features, to be stored.
#[derive(Clone, Copy, Debug)]
pub struct Record<'a> {
    /// Prompt with image placeholders expanded.
    pub ids: &'a [u32],
    /// `(t, h, w)` in patches, one per image.
    pub shapes: &'a [[u32; 3]],
    /// `[tokens, width]` row-major, as computed or after [`round_trip`](super::round_trip): the bytes are the
    /// same.
    pub values: &'a [f32],
}

/// A shard being written.
pub struct ShardWriter {
    namespace: Arc<NamespaceState>,
    open: PathBuf,
    target: PathBuf,
    /// Lock, held until the end, says that the writer lives.
    file: BufWriter<File>,
    header: [u8; HEADER],
    entries: Vec<Entry>,
    /// Theirs: equal frames of one shard are stored once.
    keys: HashSet<SampleKey>,
    at: u64,
    /// Bytes that the budget leaves.
    allowance: u64,
    rounding: Rounding,
    scratch: Vec<u8>,
    published: bool,
    /// A write failed, so the file is not what `entries` say.
    failed: bool,
}

impl Namespace {
    /// Begins a shard; makes room in the store's budget first, by evicting what is not in use.
    pub fn writer(&self) -> Result<ShardWriter, StoreError> {
        let allowance = self.0.store.make_room(&self.0.dir)?;
        ShardWriter::create(self.0.clone(), allowance)
    }
}

impl ShardWriter {
    fn create(namespace: Arc<NamespaceState>, allowance: u64) -> Result<Self, StoreError> {
        let unique = usage::unique();
        let open = namespace.dir.join(format!("open-{unique}.tmp"));
        let target = namespace.dir.join(format!("part-{unique}.vlc"));
        let file = File::create_new(&open).map_err(StoreError::io("create", &open))?;
        file.lock().map_err(StoreError::io("lock", &open))?;
        let description = &namespace.description;
        let header = shard::header(description.dtype, description.width, &namespace.key);
        let mut writer = Self {
            file: BufWriter::with_capacity(BUFFER, file),
            namespace,
            open,
            target,
            header,
            entries: Vec::new(),
            keys: HashSet::new(),
            at: 0,
            allowance,
            rounding: Rounding::default(),
            scratch: Vec::new(),
            published: false,
            failed: false,
        };
        writer.write(&header)?;
        Ok(writer)
    }

    /// Adds a record; false if the namespace, or this shard, has it already. After an error the shard can
    /// still be published as it was before, if the error is [`StoreError::OverBudget`]; after another one it
    /// must be dropped.
    pub fn append(&mut self, key: SampleKey, record: &Record<'_>) -> Result<bool, StoreError> {
        let (dtype, width) = (self.namespace.description.dtype, self.namespace.description.width as usize);
        let tokens = record.values.len() / width;
        if tokens * width != record.values.len() {
            let detail = format!("{} values are not a multiple of the width {width}", record.values.len());
            return Err(StoreError::Foreign { path: self.open.clone(), detail });
        }
        if self.keys.contains(&key) || self.namespace.holds(&key) {
            return Ok(false);
        }
        let counts = Counts {
            tokens: tokens as u32,
            ids: record.ids.len() as u32,
            shapes: record.shapes.len() as u32,
        };
        pulse::beat();
        let span = counts.span(dtype, width);
        let end = shard::end_len(self.entries.len() + 1);
        if self.at + (span + end) as u64 > self.allowance {
            return Err(self.namespace.store.over_budget());
        }
        let mut bytes = std::mem::take(&mut self.scratch);
        bytes.clear();
        bytes.extend(record.ids.iter().flat_map(|id| id.to_le_bytes()));
        bytes.extend(record.shapes.iter().flatten().flat_map(|n| n.to_le_bytes()));
        let lead = bytes.len();
        bytes.resize(counts.values_at(), 0);
        let values = bytes.len();
        codec::encode(dtype, width, record.values, &mut bytes);
        let (error, norm) = codec::squared_error(dtype, width, record.values, &bytes[values..]);
        let entry = Entry::new(key, self.at, counts, &bytes[..lead], &bytes[values..]);
        bytes.resize(span, 0);
        let written = self.write(&bytes);
        self.scratch = bytes;
        written?;
        self.rounding.squared_error += error;
        self.rounding.squared_norm += norm;
        self.keys.insert(key);
        self.entries.push(entry);
        Ok(true)
    }

    /// Records appended so far.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether nothing has been appended.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Whether it has [`SHARD_BYTES`] and should be published.
    pub fn is_full(&self) -> bool {
        self.at >= SHARD_BYTES
    }

    /// Makes all records visible to everybody, or none; returns how many. They are on disk when this returns.
    pub fn publish(mut self) -> Result<usize, StoreError> {
        if self.entries.is_empty() {
            return Ok(0);
        }
        let stride = self.entries[0]
            .counts
            .span(self.namespace.description.dtype, self.namespace.description.width as usize);
        let end = shard::index_and_footer(&self.header, &self.entries, self.at, stride, self.rounding);
        self.write(&end)?;
        self.file.flush().map_err(StoreError::io("write", &self.open))?;
        pulse::allow(self.at);
        self.file.get_ref().sync_all().map_err(StoreError::io("write", &self.open))?;
        pulse::beat();
        namespace_file::sync(&self.namespace.dir)?;
        fs::rename(&self.open, &self.target).map_err(StoreError::io("publish", &self.target))?;
        self.published = true;
        usage::sync_dir(&self.namespace.dir)?;
        pulse::beat();
        self.namespace.admit(&self.target)?;
        Ok(self.entries.len())
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), StoreError> {
        if self.failed {
            let detail = "an earlier write to this shard failed, so its records are not published".into();
            return Err(StoreError::Foreign { path: self.open.clone(), detail });
        }
        // Until it has succeeded.
        self.failed = true;
        self.file.write_all(bytes).map_err(StoreError::io("write", &self.open))?;
        (self.failed, self.at) = (false, self.at + bytes.len() as u64);
        Ok(())
    }
}

impl Drop for ShardWriter {
    fn drop(&mut self) {
        if !self.published {
            // What stays behind is invisible, and removed by `gc`.
            let _ = fs::remove_file(&self.open);
        }
    }
}
