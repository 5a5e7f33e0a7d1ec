//! A LeRobot data set's metadata and rows, as they lie on disk: no normalisation, no images decoded, no text encoded.
//!
//! [`Catalog`] is everything known before a data file is read; [`rows::RowStore`] reads rows out of data files.

mod cache;
mod columns;
pub mod episodes;
pub mod info;
pub mod rows;
pub mod stats;
mod tables;
pub mod tasks;

use std::path::{Path, PathBuf};

use self::episodes::{Episodes, parquet_files};
use self::info::{Info, Version};
use self::stats::Stats;
use self::tasks::Tasks;
use super::error::DataError;

/// A digest of what a data set contains; moving or copying the directory does not change it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fingerprint(pub [u8; 32]);

impl Fingerprint {
    /// Its first eight bytes, which key the order of samples.
    pub fn word(&self) -> u64 {
        u64::from_le_bytes(self.0[..8].try_into().expect("32 bytes hold 8"))
    }
}

impl std::fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0[..16].iter().try_for_each(|b| write!(f, "{b:02x}"))
    }
}

/// A data set's metadata.
#[derive(Debug)]
pub struct Catalog {
    /// The data set's directory.
    pub root: PathBuf,
    /// `info.json`.
    pub info: Info,
    /// The episode table.
    pub episodes: Episodes,
    /// Task texts.
    pub tasks: Tasks,
    /// Statistics; `None` if the data set has none.
    pub stats: Option<Stats>,
    /// Where statistics are, or should be.
    pub stats_path: PathBuf,
    /// Bytes of all data files.
    pub data_bytes: u64,
    /// Digest of metadata and of the sizes of data files.
    pub fingerprint: Fingerprint,
}

impl Catalog {
    /// Reads all metadata below `root` and checks that it agrees with itself and that every data file is there.
    pub fn open(root: &Path) -> Result<Self, DataError> {
        let info = Info::read(root)?;
        let episodes = Episodes::read(root, &info)?;
        let (tasks, stats, stats_path) = match info.version {
            Version::V3_0 => {
                let path = root.join("meta/stats.json");
                (tasks::read_parquet(&root.join("meta/tasks.parquet"))?, Stats::read(&path)?, path)
            }
            Version::V2_1 => {
                let path = root.join("meta/episodes_stats.jsonl");
                (tasks::read_jsonl(&root.join("meta/tasks.jsonl"))?, Stats::read_episodes(&path)?, path)
            }
        };
        let (fingerprint, data_bytes) = fingerprint(root, &info, &episodes)?;
        let root = root.to_path_buf();
        Ok(Self { root, info, episodes, tasks, stats, stats_path, data_bytes, fingerprint })
    }

    /// Where data file `file` of the episode table lies.
    pub fn data_path(&self, file: u32) -> Result<PathBuf, DataError> {
        let entry = self.episodes.files[file as usize];
        Ok(self.root.join(self.info.data_file(entry.chunk, entry.file)?))
    }

    /// A fault in row `row` of data file `file`, named by the sample it is.
    pub fn row_error(&self, file: u32, row: u64, feature: &str, fault: String) -> DataError {
        let path = match self.data_path(file) {
            Ok(path) => path,
            Err(error) => return error,
        };
        let index = self.episodes.sample_of_row(file, row).unwrap_or(row);
        let (episode, start) = self.episodes.of_sample(index).map_or((0, 0), |(n, e)| (n, e.start));
        DataError::Sample { path, index, episode, frame: index - start, feature: feature.to_string(), fault }
    }
}

/// Hashes metadata files by content and data files by size: cheap, and any re-recording changes a size or a statistic.
fn fingerprint(root: &Path, info: &Info, episodes: &Episodes) -> Result<(Fingerprint, u64), DataError> {
    let mut hash = blake3::Hasher::new_derive_key("coxswain data set fingerprint v1");
    let mut metadata = match info.version {
        Version::V3_0 => parquet_files(&root.join("meta/episodes"))?,
        Version::V2_1 => Vec::new(),
    };
    let names =
        ["info.json", "stats.json", "tasks.parquet", "episodes.jsonl", "episodes_stats.jsonl", "tasks.jsonl"];
    metadata.extend(names.map(|name| root.join("meta").join(name)).into_iter().filter(|p| p.exists()));
    for path in metadata {
        let bytes = std::fs::read(&path).map_err(DataError::io(&path, "read"))?;
        hash.update(blake3::hash(&bytes).as_bytes());
    }
    let mut total = 0;
    for file in &episodes.files {
        let path = root.join(info.data_file(file.chunk, file.file)?);
        let bytes = std::fs::metadata(&path).map_err(DataError::io(&path, "read"))?.len();
        hash.update(&bytes.to_le_bytes());
        total += bytes;
    }
    Ok((Fingerprint(hash.finalize().into()), total))
}
