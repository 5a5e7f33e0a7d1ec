//! Everything known of a data set before a data file is read, and its digest.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
};

use super::episodes::{Episodes, parquet_files};
use super::info::{Info, Version};
use super::stats::Stats;
use super::tables;
use super::tasks::{self, Tasks};
use super::videos::VideoTable;
use crate::{
    error::DataError,
    place::{
        self,
        hub::{self, Repository},
    },
};

/// A digest of what a data set contains; moving or copying the directory does not change it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fingerprint(pub [u8; 32]);

impl Fingerprint {
    /// First eight bytes, which key the order of samples.
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
    /// The files of every camera that is stored as video, in the order of features.
    pub videos: Vec<VideoTable>,
    /// Task texts.
    pub tasks: Tasks,
    /// Statistics; `None` if the data set has none.
    pub stats: Option<Stats>,
    /// Where statistics are, or should be.
    pub stats_path: PathBuf,
    /// Bytes of all data files that are there.
    pub data_bytes: u64,
    /// Data files that are not there: a part of the data set may have been downloaded.
    pub missing: BTreeSet<u32>,
    /// Bytes of all videos that are there.
    pub video_bytes: u64,
    /// Digest of metadata and of the sizes of data files and videos.
    pub fingerprint: Fingerprint,
}

impl Catalog {
    /// Reads all metadata below `root` and checks that it agrees with itself. Data files and videos may be
    /// missing: their episodes or their camera may not be asked for.
    pub fn open(root: &Path) -> Result<Self, DataError> {
        let root = &*hub::directory(root, Repository::Dataset)?;
        place::enter(root)?;
        let info = Info::read(root)?;
        let episodes = Episodes::read(root, &info)?;
        place::require(&info.tasks_path())?;
        let (tasks, stats, stats_path) = match info.version {
            Version::V3_0 => {
                let path = root.join("meta/stats.json");
                (tasks::read_parquet(&info.tasks_path())?, Stats::read_file(&path)?, path)
            }
            Version::V2_1 | Version::V2_0 => {
                let (stats, path) = stats_of_v2(root, info.version)?;
                (tasks::read_jsonl(&info.tasks_path())?, stats, path)
            }
        };
        let cameras = info.features.iter().filter(|(_, feature)| feature.is_video());
        let videos: Result<Vec<_>, DataError> =
            cameras.map(|(camera, _)| VideoTable::read(root, &info, &episodes, camera)).collect();
        let videos = videos?;
        let mut hash = metadata_hash(root, info.version)?;
        let (data_bytes, missing) = hash_data_sizes(&mut hash, root, &info, &episodes)?;
        let video_bytes = hash_video_sizes(&mut hash, root, &info, &videos)?;
        Ok(Self {
            root: root.to_path_buf(),
            info,
            episodes,
            videos,
            tasks,
            stats,
            stats_path,
            data_bytes,
            missing,
            video_bytes,
            fingerprint: Fingerprint(hash.finalize().into()),
        })
    }

    /// Where data file `file` of the episode table lies.
    pub fn data_path(&self, file: u32) -> Result<PathBuf, DataError> {
        let entry = self.episodes.files[file as usize];
        Ok(self.root.join(self.info.data_file(entry.chunk, entry.file)?))
    }

    /// The error of a run that needs data file `file`, which is not there.
    pub fn missing_file(&self, file: u32) -> DataError {
        let episodes = self.episodes.listed(file);
        let found = format!("there is no such file, but it should hold episodes {episodes}");
        let without = self.episodes.exclusion(file).map_or_else(String::new, |way| format!(", or {way}"));
        let remedy = format!("copy or download it{without}");
        match self.data_path(file) {
            Ok(path) => DataError::invalid(&path, "(file)", found, remedy),
            Err(error) => error,
        }
    }

    /// What is wrong with the shape that `info.json` gives a feature, where its rows have another number of
    /// values; none where they have as many, or where it cannot be known.
    pub fn shape_fault(&self, name: &str) -> Option<DataError> {
        let feature = self.info.feature(name)?;
        let file = (0..self.episodes.files.len() as u32).find(|file| !self.missing.contains(file))?;
        let metadata = tables::footer(&self.data_path(file).ok()?).ok()?;
        let group = metadata.row_groups().first()?;
        let is_mine = |path: &[String]| path.first().is_some_and(|root| root == name);
        let column = group.columns().iter().find(|column| is_mine(column.column_path().parts()))?;
        let (values, rows) = (column.num_values() as usize, group.num_rows() as usize);
        let stored = (rows > 0 && values.is_multiple_of(rows)).then(|| values / rows)?;
        (stored != feature.width()).then(|| {
            let found = format!("{:?}, but the data has rows of length {stored}", feature.shape);
            let remedy = "correct the shape to match the data";
            DataError::invalid(&self.info.path, format!("features.{name}.shape"), found, remedy)
        })
    }

    /// Where video `file` of `table` lies.
    pub fn video_path(&self, table: &VideoTable, file: u32) -> Result<PathBuf, DataError> {
        let entry = &table.files[file as usize];
        Ok(self.root.join(self.info.video_file(&table.camera, entry.chunk, entry.file)?))
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

/// Statistics, and where they are or should be: v2.0 has them of all episodes together, v2.1 of each. A set
/// of v2.0 that was renamed to v2.1 keeps its own, which are read where there are no others.
fn stats_of_v2(root: &Path, version: Version) -> Result<(Option<Stats>, PathBuf), DataError> {
    let [of_all, of_each] = ["meta/stats.json", "meta/episodes_stats.jsonl"].map(|name| root.join(name));
    if version == Version::V2_1
        && let Some(stats) = Stats::read_episodes(&of_each)?
    {
        return Ok((Some(stats), of_each));
    }
    match Stats::read_file(&of_all)? {
        None if version == Version::V2_1 => Ok((None, of_each)),
        stats => Ok((stats, of_all)),
    }
}

/// Hashes metadata files by content. Data files and videos are hashed by size: cheap, and any re-recording
/// changes a size or a statistic.
fn metadata_hash(root: &Path, version: Version) -> Result<blake3::Hasher, DataError> {
    let mut hash = blake3::Hasher::new_derive_key("coxswain data set fingerprint v1");
    let mut metadata = match version {
        Version::V3_0 => parquet_files(&root.join("meta/episodes"))?,
        Version::V2_1 | Version::V2_0 => Vec::new(),
    };
    let names =
        ["info.json", "stats.json", "tasks.parquet", "episodes.jsonl", "episodes_stats.jsonl", "tasks.jsonl"];
    for path in names.map(|name| root.join("meta").join(name)) {
        if place::bytes(&path)?.is_some() {
            metadata.push(path);
        }
    }
    for path in metadata {
        let mut content = blake3::Hasher::new();
        content
            .update_reader(place::Reader::new(place::open(&path)?, 0))
            .map_err(DataError::io(&path, "read"))?;
        hash.update(content.finalize().as_bytes());
    }
    Ok(hash)
}

/// Returns the bytes of all data files that are there, and which are not. One that is missing has a size of
/// its own.
fn hash_data_sizes(
    hash: &mut blake3::Hasher,
    root: &Path,
    info: &Info,
    episodes: &Episodes,
) -> Result<(u64, BTreeSet<u32>), DataError> {
    let (mut total, mut missing) = (0, BTreeSet::new());
    for (number, file) in (0..).zip(&episodes.files) {
        let bytes = place::bytes(&root.join(info.data_file(file.chunk, file.file)?))?;
        hash.update(&bytes.unwrap_or(u64::MAX).to_le_bytes());
        total += bytes.unwrap_or(0);
        if bytes.is_none() {
            missing.insert(number);
        }
    }
    Ok((total, missing))
}

/// Returns the bytes of all videos that are there. One that is missing has a size of its own.
fn hash_video_sizes(
    hash: &mut blake3::Hasher,
    root: &Path,
    info: &Info,
    videos: &[VideoTable],
) -> Result<u64, DataError> {
    let mut total = 0;
    for table in videos {
        for file in &table.files {
            let path = root.join(info.video_file(&table.camera, file.chunk, file.file)?);
            let bytes = place::bytes(&path)?;
            hash.update(&bytes.unwrap_or(u64::MAX).to_le_bytes());
            total += bytes.unwrap_or(0);
        }
    }
    Ok(total)
}
