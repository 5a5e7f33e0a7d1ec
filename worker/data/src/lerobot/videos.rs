//! Which video holds a camera's frames of an episode, and where in it they begin.
//!
//! ```text
//! v3.0   videos/<camera>/{chunk_index, file_index, from_timestamp} of meta/episodes: videos have files of
//!        their own
//! v2.x   a video for each episode
//! ```
//!
//! A time only says where an episode begins. From there on frames are counted: frame 7 of the episode is the
//! seventh after its first in the video's own table (`frames`), whatever rounding did to timestamps.
//!
//! Memory: 20 bytes an episode for each camera.

use std::{collections::HashMap, ops::Range, path::Path};

use super::episodes::{Episodes, parquet_files};
use super::info::{Info, Version};
use super::tables::Table;
use crate::error::DataError;

/// The videos of one camera.
#[derive(Clone, Debug)]
pub struct VideoTable {
    /// The feature.
    pub camera: String,
    /// In order of first use.
    pub files: Vec<VideoFile>,
    /// By episode.
    spans: Vec<Span>,
    /// Episodes by file, and within it by time.
    by_file: Vec<u32>,
}

/// A video by chunk and file number (v2.x: by chunk and episode).
#[derive(Clone, Debug)]
pub struct VideoFile {
    /// `chunk_index`.
    pub chunk: u64,
    /// `file_index`, or the episode.
    pub file: u64,
    /// Part of `by_file`.
    episodes: Range<usize>,
}

/// Where an episode's frames begin.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Span {
    /// Index into [`VideoTable::files`].
    pub file: u32,
    /// Seconds from the video's beginning.
    pub from: f64,
}

/// An episode as the metadata spells it.
struct VideoEntry {
    episode: u64,
    chunk: u64,
    file: u64,
    from: f64,
}

impl VideoTable {
    /// Reads where the videos of `camera` are, and checks that episodes do not overlap in them.
    pub fn read(root: &Path, info: &Info, episodes: &Episodes, camera: &str) -> Result<Self, DataError> {
        let dir = root.join("meta/episodes");
        let mut entries = match info.version {
            Version::V3_0 => read_parquet(&dir, camera)?,
            Version::V2_1 | Version::V2_0 => (0..info.episodes)
                .map(|episode| VideoEntry {
                    episode,
                    chunk: episode / info.chunk_size,
                    file: episode,
                    from: 0.0,
                })
                .collect(),
        };
        entries.sort_by_key(|entry| entry.episode);
        if !entries.iter().map(|entry| entry.episode).eq(0..episodes.episodes.len() as u64) {
            let found = format!("does not list each of {} episodes exactly once", episodes.episodes.len());
            return Err(DataError::invalid(&dir, column(camera, "file_index"), found, RESTORE));
        }
        let table = Self::assemble(camera, &entries);
        table.check_overlaps(&dir, info, episodes)?;
        Ok(table)
    }

    fn assemble(camera: &str, entries: &[VideoEntry]) -> Self {
        let mut files: Vec<VideoFile> = Vec::new();
        let mut by_name: HashMap<(u64, u64), u32> = HashMap::new();
        let spans: Vec<Span> = (entries.iter())
            .map(|entry| {
                let file = *by_name.entry((entry.chunk, entry.file)).or_insert_with(|| {
                    files.push(VideoFile { chunk: entry.chunk, file: entry.file, episodes: 0..0 });
                    files.len() as u32 - 1
                });
                Span { file, from: entry.from }
            })
            .collect();
        let mut by_file: Vec<u32> = (0..spans.len() as u32).collect();
        let order = |episode: &u32| spans[*episode as usize];
        by_file.sort_by(|a, b| {
            let (a, b) = (order(a), order(b));
            a.file.cmp(&b.file).then(a.from.total_cmp(&b.from))
        });
        for (place, episode) in by_file.iter().enumerate() {
            let mine = &mut files[order(episode).file as usize].episodes;
            *mine = if mine.start == mine.end { place..place + 1 } else { mine.start..place + 1 };
        }
        Self { camera: camera.to_string(), files, spans, by_file }
    }

    /// Episodes follow one another in their videos, give or take half a frame.
    fn check_overlaps(&self, dir: &Path, info: &Info, episodes: &Episodes) -> Result<(), DataError> {
        for file in &self.files {
            for pair in self.by_file[file.episodes.clone()].windows(2) {
                let [before, after] = [pair[0], pair[1]].map(|episode| self.spans[episode as usize].from);
                let frames = episodes.episodes[pair[0] as usize].length as f64 - 0.5;
                if after - before < frames / info.fps {
                    let found = format!(
                        "episode {} (from {before} s) and episode {} (from {after} s) overlap in the video of chunk {}, file {}",
                        pair[0], pair[1], file.chunk, file.file
                    );
                    return Err(DataError::invalid(
                        dir,
                        column(&self.camera, "from_timestamp"),
                        found,
                        RESTORE,
                    ));
                }
            }
        }
        Ok(())
    }

    /// Where the frames of `episode` are.
    pub fn span(&self, episode: u64) -> Option<Span> {
        self.spans.get(usize::try_from(episode).ok()?).copied()
    }

    /// The episodes in `file`, in the order of its frames.
    pub fn episodes_of(&self, file: u32) -> impl Iterator<Item = u64> + '_ {
        self.by_file[self.files[file as usize].episodes.clone()].iter().map(|episode| u64::from(*episode))
    }

    /// The episodes in `file` as `data.exclude_episodes` lists them.
    pub fn listed(&self, file: u32) -> String {
        let mut episodes: Vec<_> = self.episodes_of(file).collect();
        episodes.sort_unstable();
        let stretch = |of: &[u64]| match of {
            [first, .., last] => format!("{first}-{last}"),
            _ => of.iter().map(u64::to_string).collect(),
        };
        episodes.chunk_by(|one, next| one + 1 == *next).map(stretch).collect::<Vec<_>>().join(", ")
    }
}

const RESTORE: &str = "restore the metadata";

fn column(camera: &str, name: &str) -> String {
    format!("videos/{camera}/{name}")
}

fn read_parquet(dir: &Path, camera: &str) -> Result<Vec<VideoEntry>, DataError> {
    let mut entries = Vec::new();
    for path in parquet_files(dir)? {
        let table = Table::read_footer(&path)?;
        let wrong = |name: &str, found: String| DataError::invalid(&path, name, found, RESTORE);
        let numbers = |name: &str| {
            let bad = || wrong(name, "missing, null or not a whole number".into());
            let numbers = table.integers(name)?.ok_or_else(bad)?.into_iter();
            let number = |number: Option<i64>| {
                let number = number.ok_or_else(bad)?;
                u64::try_from(number).map_err(|_| wrong(name, number.to_string()))
            };
            numbers.map(number).collect::<Result<Vec<_>, _>>()
        };
        let (chunk, file, from) =
            (column(camera, "chunk_index"), column(camera, "file_index"), column(camera, "from_timestamp"));
        let (episodes, chunks, files) = (numbers("episode_index")?, numbers(&chunk)?, numbers(&file)?);
        let bad = || wrong(&from, "missing, null or not a number".into());
        for (row, seconds) in table.floats(&from)?.ok_or_else(bad)?.into_iter().enumerate() {
            let from_seconds = seconds.ok_or_else(bad)?;
            if !(from_seconds >= 0.0 && from_seconds.is_finite()) {
                return Err(wrong(&from, from_seconds.to_string()));
            }
            let (episode, chunk, file) = (episodes[row], chunks[row], files[row]);
            entries.push(VideoEntry { episode, chunk, file, from: from_seconds });
        }
    }
    Ok(entries)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(episode: u64, file: u64, from: f64) -> VideoEntry {
        VideoEntry { episode, chunk: 0, file, from }
    }

    #[test]
    fn episodes_are_listed_by_file_in_the_order_of_its_frames() {
        let entries = [entry(0, 3, 2.0), entry(1, 0, 0.0), entry(2, 3, 0.0), entry(3, 0, 5.0)];
        let table = VideoTable::assemble("front", &entries);
        assert_eq!(table.files.iter().map(|file| file.file).collect::<Vec<_>>(), [3, 0]);
        let of = |file| table.episodes_of(file).collect::<Vec<_>>();
        assert_eq!((of(0), of(1)), (vec![2, 0], vec![1, 3]));
        assert_eq!((table.listed(0), table.listed(1)), ("0, 2".to_owned(), "1, 3".to_owned()));
        let one = VideoTable::assemble("front", &[entry(0, 0, 0.0), entry(1, 0, 2.0), entry(2, 0, 4.0)]);
        assert_eq!(one.listed(0), "0-2");
        assert_eq!(table.span(0), Some(Span { file: 0, from: 2.0 }));
        assert_eq!(table.span(4), None);
    }
}
