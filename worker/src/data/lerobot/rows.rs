//! Rows out of data files, at random, in bounded memory.
//!
//! ```text
//! file > row group > window     a window is as many consecutive rows of one row group as fit BLOCK_BYTES
//! ```
//!
//! A window is decoded once, for all numeric columns together or for one camera (whose images stay compressed), and kept in a
//! cache that forgets the least recently used window when it exceeds `CACHE_BYTES`. So memory is bounded by the cache plus one
//! parquet page, whatever the size of the data set.
//!
//! The trade-off: samples are visited in a full random order, so once a data set is much larger than the cache, nearly every
//! sample decodes a window of its own, up to `BLOCK_BYTES` for one image. That costs a few milliseconds on the pipeline's thread,
//! hidden behind a forward pass of any real model; in return the order is a true permutation and no shuffle buffer is kept.

use std::{
    collections::{BTreeMap, HashMap},
    fs::File,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use arrow::array::{Array, ArrayRef, AsArray, RecordBatch};
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::{
    ArrowReaderMetadata, ArrowReaderOptions, ParquetRecordBatchReaderBuilder, RowSelection, RowSelector,
};
use parquet::file::metadata::RowGroupMetaData;

use super::Catalog;
use super::columns::{RowFault, integers, numbers};
use crate::data::error::DataError;

/// Decoded windows kept. A few thousand compressed camera images; small next to the weights of any model worth tuning.
const CACHE_BYTES: usize = 128 << 20;
/// Bytes of one window: large enough to hold an episode of small images, small enough to decode in milliseconds.
const BLOCK_BYTES: u64 = 4 << 20;
/// Parsed footers kept. A footer is at most a few MB; v2.1 has a file for every episode.
const OPEN_FILES: usize = 16;

/// Which columns of a data file are read.
#[derive(Clone, Debug)]
pub struct Columns {
    /// Numeric features with their shapes.
    pub numbers: Vec<(String, Vec<usize>)>,
    /// Image features.
    pub cameras: Vec<String>,
}

/// What a window holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Part {
    /// All numeric features and the bookkeeping columns.
    Numbers,
    /// Compressed images of one camera.
    Camera(usize),
}

/// Consecutive rows of one file, decoded.
#[derive(Debug)]
pub struct Block {
    /// Row of the file that the block starts with.
    pub first_row: u64,
    /// Rows.
    pub rows: usize,
    /// By feature, `rows * width` numbers; empty in a camera's block.
    pub numbers: Vec<Vec<f32>>,
    /// `episode_index`, `frame_index` and `task_index` of each row; empty in a camera's block.
    pub keys: [Vec<i64>; 3],
    images: Option<ArrayRef>,
}

impl Block {
    /// The compressed image in row `row` of the file; `None` if the row has no embedded bytes.
    pub fn image(&self, row: u64) -> Option<&[u8]> {
        let images = self.images.as_ref()?;
        let at = (row - self.first_row) as usize;
        if images.is_null(at) {
            return None;
        }
        let bytes = images.as_binary_opt::<i32>().map(|a| a.value(at));
        bytes.or_else(|| images.as_binary_opt::<i64>().map(|a| a.value(at)))
    }

    fn bytes(&self) -> usize {
        let numbers: usize = self.numbers.iter().map(|n| n.len() * 4).sum();
        let keys: usize = self.keys.iter().map(|k| k.len() * 8).sum();
        numbers + keys + self.images.as_ref().map_or(0, |i| i.get_array_memory_size())
    }
}

/// A data file's footer, and where its row groups start.
struct Footer {
    path: PathBuf,
    metadata: ArrowReaderMetadata,
    /// First row of each group, and one past the last row of the file.
    starts: Vec<u64>,
}

/// Reads rows of a data set's files.
pub struct RowStore {
    columns: Columns,
    footers: Mutex<Lru<u32, Footer>>,
    blocks: Mutex<Lru<(u32, u64, Part), Block>>,
}

impl RowStore {
    /// A store that reads these columns.
    pub fn new(columns: Columns) -> Self {
        let footers = Mutex::new(Lru::new(OPEN_FILES));
        Self { columns, footers, blocks: Mutex::new(Lru::new(CACHE_BYTES)) }
    }

    /// Parses the footer of data file `file` and checks it against the episode table and the columns asked for.
    pub fn check_file(&self, catalog: &Catalog, file: u32) -> Result<(), DataError> {
        self.footer(catalog, file).map(drop)
    }

    /// The window of `part` that row `row` of data file `file` lies in.
    pub fn block(&self, catalog: &Catalog, file: u32, row: u64, part: Part) -> Result<Arc<Block>, DataError> {
        let footer = self.footer(catalog, file)?;
        let group = footer.starts.partition_point(|s| *s <= row) - 1;
        let within = row - footer.starts[group];
        let window = self.window_rows(footer.metadata.metadata().row_group(group), part);
        let first_row = footer.starts[group] + within / window * window;
        let key = (file, first_row, part);
        if let Some(block) = lock(&self.blocks).get(&key) {
            return Ok(block);
        }
        // Decoded outside the lock: two threads may decode the same window, which is only wasted work.
        let rows = window.min(footer.starts[group + 1] - first_row) as usize;
        let batch = self.read(&footer, group, first_row - footer.starts[group], rows, part)?;
        let block = self.decode(catalog, file, &footer.path, first_row, &batch, part)?;
        let block = Arc::new(block);
        lock(&self.blocks).put(key, block.clone(), block.bytes());
        Ok(block)
    }

    fn footer(&self, catalog: &Catalog, file: u32) -> Result<Arc<Footer>, DataError> {
        if let Some(footer) = lock(&self.footers).get(&file) {
            return Ok(footer);
        }
        let path = catalog.data_path(file)?;
        let source = File::open(&path).map_err(DataError::io(&path, "read"))?;
        // Arrow's own schema would bring extension and fixed-size types; parquet's is enough and has fewer shapes.
        let options = ArrowReaderOptions::new().with_skip_arrow_metadata(true);
        let metadata =
            ArrowReaderMetadata::load(&source, options).map_err(|e| DataError::parquet(&path, e))?;
        let mut starts = vec![0u64];
        for group in metadata.metadata().row_groups() {
            starts.push(starts[starts.len() - 1] + group.num_rows().max(0) as u64);
        }
        let (found, expected) = (starts[starts.len() - 1], catalog.episodes.files[file as usize].rows);
        if found != expected {
            let found = format!("{found} rows, but the episode metadata puts {expected} there");
            return Err(DataError::invalid(
                &path,
                "rows",
                found,
                "metadata and data are of different recordings",
            ));
        }
        for name in self.names() {
            if metadata.schema().field_with_name(name).is_err() {
                let remedy = "info.json names this feature; re-export the data set";
                return Err(DataError::invalid(&path, format!("column {name}"), "missing", remedy));
            }
        }
        let footer = Arc::new(Footer { path, metadata, starts });
        lock(&self.footers).put(file, footer.clone(), 1);
        Ok(footer)
    }

    fn names(&self) -> impl Iterator<Item = &str> {
        let numbers = self.columns.numbers.iter().map(|(name, _)| name.as_str());
        numbers.chain(self.columns.cameras.iter().map(String::as_str)).chain(KEYS)
    }

    /// Whether leaf column `path` belongs to `part`.
    fn belongs(&self, path: &[String], part: Part) -> bool {
        let root = path.first().map_or("", String::as_str);
        match part {
            Part::Numbers => {
                KEYS.contains(&root) || self.columns.numbers.iter().any(|(name, _)| name == root)
            }
            Part::Camera(i) => {
                root == self.columns.cameras[i] && (path.len() == 1 || path[path.len() - 1] == "bytes")
            }
        }
    }

    fn window_rows(&self, group: &RowGroupMetaData, part: Part) -> u64 {
        let mine = group.columns().iter().filter(|c| self.belongs(c.column_path().parts(), part));
        let bytes: u64 = mine.map(|c| c.uncompressed_size().max(0) as u64).sum();
        let rows = group.num_rows().max(1) as u64;
        (BLOCK_BYTES * rows / bytes.max(1)).clamp(1, rows)
    }

    fn read(
        &self,
        footer: &Footer,
        group: usize,
        skip: u64,
        rows: usize,
        part: Part,
    ) -> Result<RecordBatch, DataError> {
        let failed = |e: &dyn std::fmt::Display| DataError::parquet(&footer.path, e);
        // A fresh handle each time: clones of one handle share a position, which threads would fight over.
        let source = File::open(&footer.path).map_err(DataError::io(&footer.path, "read"))?;
        let builder = ParquetRecordBatchReaderBuilder::new_with_metadata(source, footer.metadata.clone());
        let leaves = builder.parquet_schema().columns().iter().enumerate();
        let mine = leaves.filter(|(_, c)| self.belongs(c.path().parts(), part)).map(|(i, _)| i);
        let mask = ProjectionMask::leaves(builder.parquet_schema(), mine.collect::<Vec<_>>());
        let selection = vec![RowSelector::skip(skip as usize), RowSelector::select(rows)];
        let mut reader = builder
            .with_row_groups(vec![group])
            .with_projection(mask)
            .with_row_selection(RowSelection::from(selection))
            .with_batch_size(rows)
            .build()
            .map_err(|e| failed(&e))?;
        let batch = reader.next().ok_or_else(|| failed(&"no rows where the footer promises some"))?;
        let batch = batch.map_err(|e| failed(&e))?;
        match batch.num_rows() == rows {
            true => Ok(batch),
            false => Err(failed(&format!("{} rows where the footer promises {rows}", batch.num_rows()))),
        }
    }

    fn decode(
        &self,
        catalog: &Catalog,
        file: u32,
        path: &Path,
        first_row: u64,
        batch: &RecordBatch,
        part: Part,
    ) -> Result<Block, DataError> {
        let fault = |feature: &str, fault: RowFault| {
            row_error(catalog, file, path, first_row + fault.row as u64, feature, fault.fault)
        };
        let column = |name: &str| {
            batch.column_by_name(name).ok_or_else(|| {
                fault(
                    name,
                    RowFault { row: 0, fault: "the column has no values; re-export the data set".into() },
                )
            })
        };
        let rows = batch.num_rows();
        let mut block =
            Block { first_row, rows, numbers: Vec::new(), keys: Default::default(), images: None };
        match part {
            Part::Numbers => {
                for (name, shape) in &self.columns.numbers {
                    block.numbers.push(numbers(column(name)?, shape).map_err(|f| fault(name, f))?);
                }
                for (keys, name) in block.keys.iter_mut().zip(KEYS) {
                    *keys = integers(column(name)?).map_err(|f| fault(name, f))?;
                }
            }
            Part::Camera(i) => {
                let name = &self.columns.cameras[i];
                let stored = column(name)?;
                let bytes = match stored.as_struct_opt() {
                    Some(fields) => fields.column_by_name("bytes").cloned(),
                    None => Some(stored.clone()),
                };
                let is_binary =
                    |a: &ArrayRef| a.as_binary_opt::<i32>().is_some() || a.as_binary_opt::<i64>().is_some();
                let bytes = bytes.filter(is_binary).ok_or_else(|| {
                    let found = format!("stored as {}, expected encoded image bytes", stored.data_type());
                    fault(name, RowFault { row: 0, fault: found })
                })?;
                block.images = Some(bytes);
            }
        }
        Ok(block)
    }
}

const KEYS: [&str; 3] = ["episode_index", "frame_index", "task_index"];

/// A fault in row `row` of data file `file`, named by the sample it is.
pub fn row_error(
    catalog: &Catalog,
    file: u32,
    path: &Path,
    row: u64,
    feature: &str,
    fault: String,
) -> DataError {
    let index = catalog.episodes.sample_of_row(file, row).unwrap_or(row);
    let (episode, start) = catalog.episodes.of_sample(index).map_or((0, 0), |(n, e)| (n, e.start));
    let (path, feature) = (path.to_path_buf(), feature.to_string());
    DataError::Sample { path, index, episode, frame: index - start, feature, fault }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic while holding a cache leaves at worst a stale entry behind.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Values by key, the least recently used forgotten when their weights exceed a limit.
struct Lru<K, V> {
    limit: usize,
    weight: usize,
    clock: u64,
    entries: HashMap<K, (Arc<V>, usize, u64)>,
    by_age: BTreeMap<u64, K>,
}

impl<K: Copy + Eq + std::hash::Hash, V> Lru<K, V> {
    fn new(limit: usize) -> Self {
        Self { limit, weight: 0, clock: 0, entries: HashMap::new(), by_age: BTreeMap::new() }
    }

    fn get(&mut self, key: &K) -> Option<Arc<V>> {
        let (value, _, age) = self.entries.get_mut(key)?;
        self.by_age.remove(age);
        self.clock += 1;
        *age = self.clock;
        self.by_age.insert(self.clock, *key);
        Some(value.clone())
    }

    fn put(&mut self, key: K, value: Arc<V>, weight: usize) {
        self.remove(&key);
        self.clock += 1;
        self.weight += weight;
        self.entries.insert(key, (value, weight, self.clock));
        self.by_age.insert(self.clock, key);
        while self.weight > self.limit {
            let Some((_, oldest)) = self.by_age.first_key_value() else { break };
            let oldest = *oldest;
            self.remove(&oldest);
        }
    }

    fn remove(&mut self, key: &K) {
        if let Some((_, weight, age)) = self.entries.remove(key) {
            self.weight -= weight;
            self.by_age.remove(&age);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cache_forgets_what_was_used_longest_ago_and_never_exceeds_its_limit() {
        let mut cache = Lru::new(10);
        for key in 0..3 {
            cache.put(key, Arc::new(key), 3);
        }
        assert!(cache.get(&0).is_some());
        cache.put(3, Arc::new(3), 4);
        assert!(cache.get(&1).is_none() && cache.get(&0).is_some() && cache.get(&3).is_some());
        cache.put(4, Arc::new(4), 11);
        assert!(cache.weight <= 10 && cache.by_age.len() == cache.entries.len());
    }
}
