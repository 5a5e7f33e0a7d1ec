//! Rows out of data files, at random, in bounded memory.
//!
//! ```text
//! file > row group > window     a window is as many consecutive rows of one row group as fit a byte limit
//! ```
//!
//! A window is decoded once, for all numeric columns together or for one camera (whose images stay
//! compressed), and kept in a cache that forgets the least recently used one when it exceeds its limit
//! ([`Limits`]). So memory is bounded by the cache plus one parquet page, whatever the size of the data set.
//!
//! A footer says how many bytes a row group has. That is not believed: numbers are counted by the shapes of
//! their features, and a window of images that turns out much larger (identical images, stored once, or a
//! forged footer) is cut to the rows that fit, and so are the others of its row group.
//!
//! The trade-off: samples are visited in a full random order, so once a data set is much larger than the
//! cache, nearly every sample decodes a window of its own, up to `block_bytes` for one image. That costs a
//! few milliseconds on the pipeline's thread, hidden behind a forward pass of any real model; in return the
//! order is a true permutation and no shuffle buffer is kept.

use std::{
    collections::HashMap,
    ops::Range,
    path::PathBuf,
    sync::{Arc, Mutex},
};

use parquet::file::metadata::ParquetMetaData;

use super::cache::{Lru, lock};
use super::catalog::Catalog;
use super::columns::{ColumnFault, Images, RowFault, images, integers, numbers};
pub use super::columns::{Misfit, NO_INTEGER};
use super::tables::{self, Chunks, Column, Rows};
use crate::error::DataError;
use crate::surviving::{DECODING, surviving};

/// How much a store may keep.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Bytes of decoded windows.
    pub cache_bytes: usize,
    /// Bytes of one window.
    pub block_bytes: u64,
    /// Parsed footers.
    pub footers: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            // A few thousand compressed camera images; small next to the weights of any model worth tuning.
            cache_bytes: 128 << 20,
            // Holds an episode of small images, and decodes in milliseconds.
            block_bytes: 4 << 20,
            // A footer is at most a few MB; v2.1 has a file for every episode.
            footers: 16,
        }
    }
}

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
    /// By feature, `rows * width` numbers; empty in a camera's block. NaN where a row has none of the
    /// feature's shape.
    pub numbers: Vec<Vec<f32>>,
    /// `episode_index`, `frame_index` and `task_index` of each row; empty in a camera's block.
    pub keys: [Vec<i64>; 3],
    images: Images,
    /// By column, the rows that have no value of its shape, in order.
    misfits: Vec<(String, Vec<RowFault>)>,
}

impl Block {
    /// The compressed image in row `row` of the file; `None` if the row has no embedded bytes.
    pub fn image(&self, row: u64) -> Option<&[u8]> {
        self.images.get((row - self.first_row) as usize)
    }

    /// Whether row `row` of the file is here.
    pub fn holds(&self, row: u64) -> bool {
        (self.first_row..self.first_row + self.rows as u64).contains(&row)
    }

    /// What is wrong with the value of this column in row `row` of the file, if it has not the shape that
    /// `info.json` promises.
    pub fn misfit(&self, row: u64, column: &str) -> Option<Misfit> {
        let (_, rows) = self.misfits.iter().find(|(name, _)| name == column)?;
        let row = (row - self.first_row) as usize;
        let at = rows.binary_search_by_key(&row, |fault| fault.row).ok()?;
        Some(rows[at].misfit)
    }

    /// The first of LeRobot's own columns that has no value in row `row` of the file, and what is wrong.
    pub fn missing_key(&self, row: u64) -> Option<(&'static str, Misfit)> {
        KEYS.into_iter().find_map(|key| Some((key, self.misfit(row, key)?)))
    }

    fn bytes(&self) -> usize {
        let numbers: usize = self.numbers.iter().map(|n| n.len() * 4).sum();
        let keys: usize = self.keys.iter().map(|k| k.len() * 8).sum();
        let misfits: usize = self.misfits.iter().map(|(_, rows)| size_of_val(&rows[..])).sum();
        numbers + keys + misfits + self.images.bytes()
    }
}

/// A data file's footer, and where its row groups start.
struct Footer {
    path: PathBuf,
    metadata: ParquetMetaData,
    /// First row of each group, and one past the last row of the file.
    starts: Vec<u64>,
}

/// Reads rows of a data set's files.
pub struct RowStore {
    columns: Columns,
    limits: Limits,
    footers: Mutex<Lru<u32, Footer>>,
    blocks: Mutex<Lru<(u32, u64, Part), Block>>,
    /// Rows at most in a window of this file, row group and part, where the footer let too many be expected.
    narrow: Mutex<HashMap<(u32, usize, Part), u64>>,
}

impl RowStore {
    /// A store that reads these columns.
    pub fn new(columns: Columns, limits: Limits) -> Self {
        let footers = Mutex::new(Lru::new(limits.footers));
        let blocks = Mutex::new(Lru::new(limits.cache_bytes));
        Self { columns, limits, footers, blocks, narrow: Mutex::default() }
    }

    /// Parses the footer of data file `file` and checks it against the episode table and the columns asked
    /// for.
    pub fn check_file(&self, catalog: &Catalog, file: u32) -> Result<(), DataError> {
        self.footer(catalog, file).map(drop)
    }

    /// The window of `part` that row `row` of data file `file` lies in. A decoder that panics is an error of
    /// that row.
    pub fn block(&self, catalog: &Catalog, file: u32, row: u64, part: Part) -> Result<Arc<Block>, DataError> {
        surviving(
            || self.decoded(catalog, file, row, part),
            |fault| catalog.row_error(file, row, DECODING, fault),
        )
    }

    fn decoded(&self, catalog: &Catalog, file: u32, row: u64, part: Part) -> Result<Arc<Block>, DataError> {
        let footer = self.footer(catalog, file)?;
        loop {
            let window = self.window(&footer, file, row, part);
            let key = (file, window.first_row(), part);
            if let Some(block) = lock(&self.blocks).get(&key) {
                return Ok(block);
            }
            // Decoded outside the lock: two threads may decode the same window, which is only wasted work.
            let source = self.brought(&window)?;
            let block = match self.read_window(&window, &source) {
                Ok(block) => Arc::new(block),
                Err((_, ColumnFault::TooLarge { rows })) => {
                    let mut narrow = lock(&self.narrow);
                    let most = narrow.entry((file, window.group, part)).or_insert(u64::MAX);
                    *most = (*most).min(rows as u64);
                    continue;
                }
                Err((_, ColumnFault::File(error))) => return Err(DataError::parquet(&footer.path, error)),
                Err((feature, ColumnFault::Column(fault))) => {
                    return Err(catalog.row_error(file, row, &feature, fault));
                }
            };
            lock(&self.blocks).put(key, block.clone(), block.bytes());
            return Ok(block);
        }
    }

    /// Brings what [`RowStore::block`] reads from its file, where that is far away. Decodes nothing.
    pub fn bring(&self, catalog: &Catalog, file: u32, row: u64, part: Part) -> Result<(), DataError> {
        let footer = self.footer(catalog, file)?;
        self.brought(&self.window(&footer, file, row, part)).map(drop)
    }

    /// The window's file, with all columns of the window at hand.
    fn brought(&self, window: &Window<'_>) -> Result<Arc<Chunks>, DataError> {
        let source = Chunks::open(&window.footer.path)?;
        let group = window.footer.metadata.row_group(window.group);
        let leaves = group.columns().iter().enumerate();
        let mine = leaves.filter(|(_, column)| self.belongs(column.column_path().parts(), window.part));
        source.bring(mine.map(|(leaf, _)| window.within(tables::span(group, leaf))))?;
        Ok(source)
    }

    /// Forgets all decoded windows.
    pub fn forget(&self) {
        *lock(&self.blocks) = Lru::new(self.limits.cache_bytes);
    }

    /// Bytes of decoded windows kept now.
    pub fn cached_bytes(&self) -> usize {
        lock(&self.blocks).weight()
    }

    fn footer(&self, catalog: &Catalog, file: u32) -> Result<Arc<Footer>, DataError> {
        if let Some(footer) = lock(&self.footers).get(&file) {
            return Ok(footer);
        }
        let path = catalog.data_path(file)?;
        let metadata = tables::footer(&path)?;
        let mut starts = vec![0u64];
        for group in metadata.row_groups() {
            starts.push(starts[starts.len() - 1] + group.num_rows().max(0) as u64);
        }
        let (found, expected) = (starts[starts.len() - 1], catalog.episodes.files[file as usize].rows);
        if found != expected {
            let found = format!("{found} rows, but the episode metadata says {expected}");
            let without =
                catalog.episodes.exclusion(file).map_or_else(String::new, |way| format!(", or {way}"));
            let remedy = format!("metadata and data do not match: restore the one that is wrong{without}");
            return Err(DataError::invalid(&path, "rows", found, remedy));
        }
        let columns = metadata.file_metadata().schema().get_fields();
        for name in self.names() {
            if !columns.iter().any(|column| column.name() == name) {
                let remedy = "info.json names this feature: re-export the data set, or set its dtype to video if its images are in videos/";
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
                root == self.columns.cameras[i] && path[1..].iter().all(|field| field == "bytes")
            }
        }
    }

    fn window<'a>(&self, footer: &'a Footer, file: u32, row: u64, part: Part) -> Window<'a> {
        let group = footer.starts.partition_point(|s| *s <= row) - 1;
        let metadata = footer.metadata.row_group(group);
        let all = metadata.num_rows().max(1) as u64;
        let mine = metadata.columns().iter().filter(|c| self.belongs(c.column_path().parts(), part));
        let claimed: u64 = mine.fold(0, |sum, c| sum.saturating_add(c.uncompressed_size().max(0) as u64));
        let bytes = claimed.max(all.saturating_mul(self.row_bytes(part)));
        let fit = (self.limits.block_bytes as u128 * all as u128 / bytes.max(1) as u128) as u64;
        let narrow = lock(&self.narrow).get(&(file, group, part)).copied().unwrap_or(all);
        let size = fit.min(narrow).clamp(1, all);
        let skip = (row - footer.starts[group]) / size * size;
        Window { footer, part, group, skip, rows: size.min(all - skip) as usize }
    }

    /// Bytes that a row has when it is decoded, as far as shapes say it.
    fn row_bytes(&self, part: Part) -> u64 {
        match part {
            Part::Numbers => {
                let values: usize =
                    self.columns.numbers.iter().map(|(_, shape)| shape.iter().product::<usize>()).sum();
                (4 * values + 8 * KEYS.len()) as u64
            }
            Part::Camera(_) => 0,
        }
    }

    /// Failure names the feature.
    fn read_window(&self, window: &Window<'_>, source: &Arc<Chunks>) -> Result<Block, (String, ColumnFault)> {
        let mut block = Block {
            first_row: window.first_row(),
            rows: window.rows,
            numbers: Vec::new(),
            keys: Default::default(),
            images: Images::default(),
            misfits: Vec::new(),
        };
        let mut misfits = |name: &str, rows: Vec<RowFault>| {
            if !rows.is_empty() {
                block.misfits.push((name.to_string(), rows));
            }
        };
        let named = |name: &str, fault| (name.to_string(), fault);
        let column = |name| self.column(window, source, name);
        match window.part {
            Part::Numbers => {
                for (name, shape) in &self.columns.numbers {
                    let values = column(name).and_then(|column| numbers(&column, shape));
                    let (values, rows) = values.map_err(|fault| named(name, fault))?;
                    block.numbers.push(values);
                    misfits(name, rows);
                }
                for (keys, name) in block.keys.iter_mut().zip(KEYS) {
                    let values = column(name).and_then(|column| integers(&column));
                    let (values, rows) = values.map_err(|fault| named(name, fault))?;
                    *keys = values;
                    misfits(name, rows);
                }
            }
            Part::Camera(i) => {
                let name = &self.columns.cameras[i];
                let images = column(name).and_then(|column| images(&column, self.limits.block_bytes));
                block.images = images.map_err(|fault| named(name, fault))?;
            }
        }
        Ok(block)
    }

    /// The rows of the column called `name`.
    fn column<'a>(
        &self,
        window: &Window<'a>,
        source: &Arc<Chunks>,
        name: &str,
    ) -> Result<Column<'a>, ColumnFault> {
        let group = window.footer.metadata.row_group(window.group);
        let is_mine = |path: &[String]| path[0] == name && self.belongs(path, window.part);
        let leaves = group.columns().iter().map(|c| c.column_path().parts());
        let mut mine = leaves.enumerate().filter(|(_, path)| is_mine(path)).map(|(leaf, _)| leaf);
        let wrong = |fault: &str| Err(ColumnFault::Column(fault.to_string()));
        let rows = Rows { skip: window.skip as usize, count: window.rows };
        match (mine.next(), mine.next()) {
            (Some(leaf), None) => Ok(Column::new(source.clone(), group, leaf, rows)),
            (None, _) => wrong("the column has no values; re-export the data set"),
            (Some(_), Some(_)) => wrong("stored as several columns; re-export the data set"),
        }
    }
}

/// Consecutive rows of one row group.
struct Window<'a> {
    footer: &'a Footer,
    part: Part,
    group: usize,
    /// Rows of the group before the window.
    skip: u64,
    rows: usize,
}

impl Window<'_> {
    fn first_row(&self) -> u64 {
        self.footer.starts[self.group] + self.skip
    }

    /// What of a column of the row group is read for the window. Pages are found one after the other from the
    /// column's beginning, so it is the part up to the window's end, if rows are alike, and an eighth more.
    fn within(&self, column: Range<u64>) -> Range<u64> {
        let all = self.footer.metadata.row_group(self.group).num_rows().max(1) as u128;
        let len = u128::from(column.end - column.start);
        let upto = len * (u128::from(self.skip) + self.rows as u128) / all + len / 8;
        column.start..column.end.min(column.start + upto as u64)
    }
}

const KEYS: [&str; 3] = ["episode_index", "frame_index", "task_index"];
