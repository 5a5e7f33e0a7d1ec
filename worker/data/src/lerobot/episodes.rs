//! The episode table: which rows of which data file belong to which episode.
//!
//! v3.0 reads `meta/episodes/chunk-*/file-*.parquet` (four of its many columns), v2.1 and v2.0 read
//! `meta/episodes.jsonl`. Either way a sample's number is its position in the concatenation of all episodes,
//! and rows lie in a file in that order.
//!
//! Memory: 40 bytes an episode, the only thing here that grows with the data set.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
};

use serde::Deserialize;

use super::info::{Info, Version};
use super::tables::Table;
use crate::{error::DataError, place, text::read_text};

/// One recorded episode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Episode {
    /// First sample, counted over the whole data set.
    pub start: u64,
    /// Frames.
    pub length: u64,
    /// Index into [`Episodes::files`].
    pub file: u32,
    /// First row within the file.
    pub first_row: u64,
}

impl Episode {
    /// One past the last sample.
    pub fn end(&self) -> u64 {
        self.start + self.length
    }
}

/// A data file by chunk and file number (v2.1: by chunk and episode), and the rows that the metadata puts in
/// it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataFile {
    /// `chunk_index`.
    pub chunk: u64,
    /// `file_index`, or the episode.
    pub file: u64,
    /// Rows.
    pub rows: u64,
}

/// All episodes in order, and the files they lie in.
#[derive(Clone, Debug, Default)]
pub struct Episodes {
    /// By episode index.
    pub episodes: Vec<Episode>,
    /// In order of first use.
    pub files: Vec<DataFile>,
}

/// An episode as the metadata spells it.
struct EpisodeEntry {
    index: u64,
    length: u64,
    chunk: u64,
    file: u64,
}

impl Episodes {
    /// Reads the table of the data set at `root`.
    pub fn read(root: &Path, info: &Info) -> Result<Self, DataError> {
        let (path, entries) = match info.version {
            Version::V3_0 => {
                let dir = root.join("meta/episodes");
                // Buckets have no folders to ask for.
                if !place::is_remote(&dir) {
                    place::require(&dir)?;
                }
                let mut entries = Vec::new();
                for path in parquet_files(&dir)? {
                    read_parquet(&path, &mut entries)?;
                }
                (dir, entries)
            }
            Version::V2_1 | Version::V2_0 => {
                let path = root.join("meta/episodes.jsonl");
                place::require(&path)?;
                let entries = read_jsonl(&path, info.chunk_size)?;
                (path, entries)
            }
        };
        Self::assemble(&path, info, entries)
    }

    fn assemble(path: &Path, info: &Info, mut entries: Vec<EpisodeEntry>) -> Result<Self, DataError> {
        entries.sort_by_key(|e| e.index);
        let mut table = Self::default();
        let mut by_name: HashMap<(u64, u64), u32> = HashMap::new();
        let mut start = 0;
        for (position, entry) in entries.iter().enumerate() {
            if entry.index != position as u64 {
                let found = format!("episode {} where {position} was expected", entry.index);
                let remedy = "episodes must be numbered from 0 without gaps: restore the missing metadata, \
                              or, if the episode is lost, renumber the episodes after it with \
                              docs/guide/renumber_episodes.py";
                return Err(DataError::invalid(path, "episode_index", found, remedy));
            }
            if entry.length == 0 {
                let found = format!("episode {} is empty", entry.index);
                return Err(DataError::invalid(
                    path,
                    "length",
                    found,
                    "delete the episode from the data set",
                ));
            }
            let file = *by_name.entry((entry.chunk, entry.file)).or_insert_with(|| {
                table.files.push(DataFile { chunk: entry.chunk, file: entry.file, rows: 0 });
                table.files.len() as u32 - 1
            });
            let rows = &mut table.files[file as usize].rows;
            table.episodes.push(Episode { start, length: entry.length, file, first_row: *rows });
            *rows += entry.length;
            start += entry.length;
        }
        if start != info.frames || table.episodes.len() as u64 != info.episodes {
            let found = format!(
                "{} episodes and {start} frames in all, but {} says {} episodes and {} frames",
                table.episodes.len(),
                info.path.display(),
                info.episodes,
                info.frames
            );
            return Err(DataError::invalid(path, "length", found, "restore the metadata"));
        }
        Ok(table)
    }

    /// Frames of all episodes.
    pub fn frames(&self) -> u64 {
        self.episodes.last().map_or(0, Episode::end)
    }

    /// The episode that sample `index` belongs to, and its number.
    pub fn of_sample(&self, index: u64) -> Option<(u64, Episode)> {
        let number = self.episodes.partition_point(|e| e.end() <= index);
        self.episodes.get(number).map(|e| (number as u64, *e))
    }

    /// The episodes in file `file`, as `data.exclude_episodes` lists them: the first and the last.
    pub fn listed(&self, file: u32) -> String {
        let mut mine = (0u64..).zip(&self.episodes).filter(|(_, episode)| episode.file == file);
        let first = mine.next().map_or(0, |(number, _)| number);
        match mine.last() {
            Some((last, _)) => format!("{first}-{last}"),
            None => first.to_string(),
        }
    }

    /// How a run does without what is in this file; none where every episode is in it.
    pub fn exclusion(&self, file: u32) -> Option<String> {
        let others = self.episodes.iter().any(|episode| episode.file != file);
        others.then(|| {
            format!("leave this file's episodes out with `data.exclude_episodes: [{}]`", self.listed(file))
        })
    }

    /// The sample in row `row` of file `file`.
    pub fn sample_of_row(&self, file: u32, row: u64) -> Option<u64> {
        let holds = |e: &&Episode| e.file == file && (e.first_row..e.first_row + e.length).contains(&row);
        self.episodes.iter().find(holds).map(|e| e.start + row - e.first_row)
    }
}

/// The parquet files two levels below `dir`, in order of their names.
pub fn parquet_files(dir: &Path) -> Result<Vec<PathBuf>, DataError> {
    let Some(chunks) = place::entries(dir)? else { return numbered(dir) };
    let mut files = Vec::new();
    for chunk in chunks.into_iter().filter(|path| place::is_remote(path) || path.is_dir()) {
        let below = place::entries(&chunk)?.into_iter().flatten();
        files.extend(below.filter(|path| path.extension().is_some_and(|ending| ending == "parquet")));
    }
    Ok(files)
}

/// Parquet files on a server that does not list: as LeRobot numbers them, until one is not there.
fn numbered(dir: &Path) -> Result<Vec<PathBuf>, DataError> {
    let mut files = Vec::new();
    for chunk in 0.. {
        let before = files.len();
        for file in 0.. {
            let path = dir.join(format!("chunk-{chunk:03}/file-{file:03}.parquet"));
            if place::bytes(&path)?.is_none() {
                break;
            }
            files.push(path);
        }
        if files.len() == before {
            break;
        }
    }
    Ok(files)
}

fn read_parquet(path: &Path, out: &mut Vec<EpisodeEntry>) -> Result<(), DataError> {
    const COLUMNS: [&str; 4] = ["episode_index", "length", "data/chunk_index", "data/file_index"];
    let table = Table::read_footer(path)?;
    let mut columns: [std::vec::IntoIter<u64>; 4] = Default::default();
    for (column, name) in columns.iter_mut().zip(COLUMNS) {
        let invalid = |found: String| DataError::invalid(path, name, found, "restore the metadata");
        let bad = || invalid("missing, null or not a whole number".into());
        let numbers = table.integers(name)?.ok_or_else(bad)?;
        let number = |n: Option<i64>| {
            n.ok_or_else(bad).and_then(|n| u64::try_from(n).map_err(|_| invalid(n.to_string())))
        };
        *column = numbers.into_iter().map(number).collect::<Result<Vec<_>, _>>()?.into_iter();
    }
    let [index, length, chunk, file] = columns;
    let rows = index.zip(length).zip(chunk.zip(file));
    out.extend(rows.map(|((index, length), (chunk, file))| EpisodeEntry { index, length, chunk, file }));
    Ok(())
}

fn read_jsonl(path: &Path, chunk_size: u64) -> Result<Vec<EpisodeEntry>, DataError> {
    #[derive(Deserialize)]
    struct Line {
        episode_index: u64,
        length: u64,
    }
    let mut entries = Vec::new();
    for (number, line) in read_text(path)?.lines().enumerate().filter(|(_, l)| !l.trim().is_empty()) {
        let Line { episode_index: index, length } = serde_json::from_str(line).map_err(|e| {
            let remedy = "each line needs episode_index and length";
            DataError::invalid(path, format!("line {}", number + 1), e.to_string(), remedy)
        })?;
        entries.push(EpisodeEntry { index, length, chunk: index / chunk_size, file: index });
    }
    Ok(entries)
}
