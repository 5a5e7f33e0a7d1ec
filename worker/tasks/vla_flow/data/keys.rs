//! Names of samples by content, for the feature store: the encoded images in camera order, and the rendered
//! prompt.
//!
//! ```text
//! image bytes ── digest, by row and camera, remembered by file ─┐
//! video ──────── digest, remembered ── with the frame's place ──┤
//! task_index ──────────────── remembered by file ── prompt ─────┴─▶ SampleKey, by sample
//! ```
//!
//! Of a set in a bucket nothing is read for that but task indices: an image is named by its object, the
//! version that the bucket gives of it (its entity tag) and its row, a video by object and version. So the
//! same images elsewhere have other names, and their features are computed there once more.
//!
//! A frame of a video is named by the video's bytes, by where in it the metadata lets its episode begin, and
//! by its number in the episode: what it shows is a function of these (`coxswain_data::lerobot::frames`).
//! Nothing is decoded for that.
//!
//! Reading and hashing all images of a data set takes as long as the disk gives them. It is done once, by one
//! of the processes of a node, on all its cores; later launches find the digests in the store's memo as long
//! as the data files have not changed. Only what depends on the file is remembered: another prompt or another
//! choice of cameras makes other keys from the same digests.
//!
//! In memory: 33 bytes a frame; while they are made, 32 more for each camera and one for the task, which the
//! memo shares.
//!
//! A sample that cannot be read has no key: it is a miss, and fails where samples are read, as it would
//! without a store. Whether it is lost or the disk was away for a moment is not known, so a column that could
//! not be read as a whole is not remembered.

use std::{
    collections::BTreeMap,
    ops::Range,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use super::dataset::{Dataset, FrameStorage};
use coxswain_data::{
    DataError,
    lerobot::{
        rows::Part,
        videos::{Span, VideoTable},
    },
    place,
};
use coxswain_feature_store::{Digest, Memo, SampleKey, Stamp, Store, StoreError};
use coxswain_nn::pulse;
use coxswain_task::SampleKeys;

/// Rows that a thread takes at once: several windows of the row store, so that few are decoded by two
/// threads.
const STRIPE: u64 = 512;
/// Stands for a row that could not be read.
const NONE: Digest = Digest([0; 32]);
/// The column of task indices among those of cameras, whose names are features and so contain no space.
const TASKS: &str = "task index";

/// Where an object of a bucket has its name, and an image in one.
const OBJECT_DOMAIN: &str = "coxswain vl cache object v1";
const OBJECT_ROW_DOMAIN: &str = "coxswain vl cache row of an object v1";
/// Under which a video's digest is remembered.
const VIDEO: &str = "video";
/// Where a frame of a video has its name. To be changed with how frames are found or turned into colours.
const FRAME_DOMAIN: &str = "coxswain vl cache video frame v1";

/// What is hashed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Content {
    /// A column of a data file, row by row.
    Rows(Part),
    /// All of a video.
    Video,
}

/// One column of one data file, or one video, to be read.
struct Task {
    /// The place of what is read among the digests: the file, and a column's or a camera's name.
    place: (u32, String),
    path: PathBuf,
    /// None of an object in a bucket, of which nothing is remembered.
    stamp: Option<Stamp>,
    content: Content,
    /// Digests to be found.
    len: u64,
    found: Mutex<Vec<Digest>>,
    /// Some rows could not be read.
    failed: AtomicBool,
}

impl Task {
    /// The name that the memo has for it.
    fn remembered_as(&self) -> &str {
        match self.content {
            Content::Rows(_) => &self.place.1,
            Content::Video => VIDEO,
        }
    }

    /// These rows could not be read. The first time that is said: where a whole file is lost there are
    /// thousands.
    fn fails(&self, rows: Range<u64>, error: &dyn std::fmt::Display) {
        let Range { start, end } = rows;
        if !self.failed.swap(true, Ordering::Relaxed) {
            let (path, name) = (self.path.display(), &self.place.1);
            tracing::warn!(
                %error,
                "{path}: cannot read rows {start}..{end} of {name} for the cache: their features, and those of other rows that fail, are computed in every epoch of this launch"
            );
        }
    }
}

impl Dataset {
    /// Keys of all samples, from the store's memo and, where that does not know them, from the data files.
    pub fn sample_keys(&self, store: &Store) -> Result<SampleKeys, StoreError> {
        let root = std::fs::canonicalize(&self.catalog.root).unwrap_or_else(|_| self.catalog.root.clone());
        let bytes = std::os::unix::ffi::OsStrExt::as_bytes(root.as_os_str());
        let name = Digest::of("coxswain vl cache data set v1", [("root", bytes)]).to_string();
        let mut memo = Memo::open(store, &name[..16])?;
        let (mut tables, tasks) = self.remembered(&memo, &root);
        let images_read = self.read_columns(&tasks);
        for task in tasks {
            let name = task.remembered_as().to_owned();
            let Task { place, path, stamp, found, failed, .. } = task;
            let digests: Arc<[_]> = found.into_inner().unwrap_or_else(PoisonError::into_inner).into();
            if let (false, Some(stamp)) = (failed.into_inner(), stamp) {
                memo.put(&path, &name, stamp, digests.clone());
            }
            tables.insert(place, digests);
        }
        // What cannot be remembered is read again next time.
        if let Err(error) = memo.save() {
            tracing::warn!(%error, "cannot save image digests; the next launch computes them again");
        }
        Ok(SampleKeys::new(self.assemble(&tables), images_read))
    }

    /// How images become the model's input, in words: an ingredient of every namespace.
    pub fn preprocessing(&self) -> String {
        let limit = self.settings.observation.max_text_tokens;
        let limit = limit.map_or(String::new(), |most| format!("; at most {most} tokens of text"));
        self.images.describe() + &limit
    }

    /// What stands around the task in every prompt: an ingredient of every namespace.
    pub fn prompt_template(&self) -> String {
        self.prompt.template()
    }

    /// The columns and videos that the memo knows, and those that must be read.
    fn remembered(&self, memo: &Memo, root: &Path) -> (Tables, Vec<Task>) {
        let mut columns = vec![(TASKS, Part::Numbers)];
        columns.extend(self.cameras.iter().filter_map(|camera| match camera.stored {
            FrameStorage::Images(column) => Some((camera.name.as_str(), Part::Camera(column))),
            FrameStorage::Video(_) => None,
        }));
        let mut all = Vec::new();
        for (file, entry) in (0..).zip(&self.catalog.episodes.files) {
            let wanted = columns.iter().map(|(name, part)| ((file, *name), Content::Rows(*part), entry.rows));
            let path = self.catalog.data_path(file);
            all.extend(path.into_iter().flat_map(|path| wanted.clone().map(move |w| (path.clone(), w))));
        }
        for (name, table) in self.video_tables() {
            let files = 0..table.files.len() as u32;
            let paths = files.filter_map(|file| Some((file, self.catalog.video_path(table, file).ok()?)));
            all.extend(paths.map(|(file, path)| (path, ((file, name), Content::Video, 1))));
        }
        let (mut tables, mut tasks) = (Tables::new(), Vec::new());
        for (path, ((file, name), content, len)) in all {
            let path = path.strip_prefix(&self.catalog.root).map_or(path.clone(), |below| root.join(below));
            // A file that cannot be found or read leaves its samples without keys.
            let Ok(object) = of_object(&path) else { continue };
            let stamp = match (&object, content) {
                (Some(object), Content::Video) => {
                    tables.insert((file, name.to_owned()), [*object].into());
                    continue;
                }
                (Some(object), Content::Rows(Part::Camera(_))) => {
                    let rows = (0..len).map(|row| of_row(object, name, row));
                    tables.insert((file, name.to_owned()), rows.collect());
                    continue;
                }
                (Some(_), Content::Rows(Part::Numbers)) => None,
                (None, _) => match Stamp::of(&path) {
                    Ok(stamp) => Some(stamp),
                    Err(_) => continue,
                },
            };
            let (found, failed) = (Mutex::new(vec![NONE; len as usize]), AtomicBool::new(false));
            let task = Task { place: (file, name.to_owned()), path, stamp, content, len, found, failed };
            let known = memo.get(&task.path, task.remembered_as());
            match known.filter(|digests| digests.len() as u64 == len) {
                Some(digests) => drop(tables.insert(task.place, digests)),
                None => tasks.push(task),
            }
        }
        (tables, tasks)
    }

    /// The run's cameras that are stored as video, with their files.
    fn video_tables(&self) -> impl Iterator<Item = (&str, &VideoTable)> {
        self.cameras.iter().filter_map(|camera| match camera.stored {
            FrameStorage::Images(_) => None,
            FrameStorage::Video(video) => {
                Some((camera.name.as_str(), self.frames.table(&self.catalog, video)))
            }
        })
    }

    /// Reads columns and videos on all cores; returns how many images and videos were hashed.
    fn read_columns(&self, tasks: &[Task]) -> u64 {
        let stripes: Vec<(&Task, u64)> = tasks
            .iter()
            .flat_map(|task| (0..task.len).step_by(STRIPE as usize).map(move |first| (task, first)))
            .collect();
        let (next, images) = (AtomicU64::new(0), AtomicU64::new(0));
        let work = || {
            while let Some((task, first)) = stripes.get(next.fetch_add(1, Ordering::Relaxed) as usize) {
                pulse::beat();
                let found = self.read_stripe(task, *first);
                if task.content != Content::Rows(Part::Numbers) {
                    images.fetch_add(found.iter().filter(|d| **d != NONE).count() as u64, Ordering::Relaxed);
                }
                let mut table = task.found.lock().unwrap_or_else(PoisonError::into_inner);
                table[*first as usize..][..found.len()].copy_from_slice(&found);
            }
        };
        let threads = std::thread::available_parallelism().map_or(1, usize::from).min(stripes.len());
        // Not rayon's pool: that one belongs to the training threads.
        std::thread::scope(|scope| {
            for _ in 1..threads {
                scope.spawn(work);
            }
            work();
        });
        images.into_inner()
    }

    /// Digests of some rows of a column, or of a video; [`NONE`] for those that cannot be read.
    fn read_stripe(&self, task: &Task, first: u64) -> Vec<Digest> {
        let part = match task.content {
            Content::Rows(part) => part,
            Content::Video => {
                let digest = Digest::of_file(&task.path).inspect_err(|error| task.fails(0..1, error));
                return vec![digest.unwrap_or(NONE)];
            }
        };
        let end = (first + STRIPE).min(task.len);
        let mut found = Vec::with_capacity((end - first) as usize);
        let mut row = first;
        while row < end {
            let block = match self.rows.block(&self.catalog, task.place.0, row, part) {
                Ok(block) => block,
                Err(error) => {
                    // The windows after it may be sound, but where they begin is not known without it; the
                    // next stripe finds its own.
                    task.fails(row..end, &error);
                    found.resize((end - first) as usize, NONE);
                    break;
                }
            };
            let last = end.min(block.first_row + block.rows as u64);
            for row in row..last {
                found.push(match part {
                    Part::Camera(_) => block.image(row).map_or(NONE, Digest::of_image),
                    Part::Numbers => of_task(block.keys[2][(row - block.first_row) as usize]),
                });
            }
            row = last;
        }
        found
    }

    /// Keys by sample, from tables by file and row.
    fn assemble(&self, tables: &Tables) -> Vec<Option<SampleKey>> {
        let tasks = self.catalog.tasks.iter();
        let prompts: BTreeMap<i64, String> =
            tasks.map(|(index, text)| (*index, self.prompt.render(text))).collect();
        let mut keys = Vec::with_capacity(self.len() as usize);
        for (number, episode) in (0..).zip(&self.catalog.episodes.episodes) {
            let column = |name: &str| tables.get(&(episode.file, name.to_owned()));
            let cameras: Option<Vec<Pictures<'_>>> = (self.cameras.iter())
                .map(|camera| match camera.stored {
                    FrameStorage::Images(_) => Some(Pictures::Images(column(&camera.name)?)),
                    FrameStorage::Video(video) => {
                        let Span { file, from } = self.frames.table(&self.catalog, video).span(number)?;
                        let digest = tables.get(&(file, camera.name.clone()))?.first()?;
                        Some(Pictures::Video { digest: there(digest)?, from })
                    }
                })
                .collect();
            let tasks = column(TASKS);
            for frame in 0..episode.length {
                let row = (episode.first_row + frame) as usize;
                let seen = self.settings.observation.rows_back().map(|back| frame.saturating_sub(back));
                let images = seen.flat_map(|frame| {
                    let row = (episode.first_row + frame) as usize;
                    cameras.iter().flatten().map(move |pictures| pictures.digest(row, frame))
                });
                let images = images.collect::<Option<Vec<_>>>().filter(|_| cameras.is_some());
                let task = tasks.and_then(|tasks| task_of(there(tasks.get(row)?)?));
                let prompt = task.and_then(|task| prompts.get(&task));
                keys.push(images.zip(prompt).map(|(images, prompt)| SampleKey::new(&images, prompt)));
            }
        }
        keys
    }
}

/// What a camera has of an episode.
enum Pictures<'a> {
    /// Digests of the rows of a data file.
    Images(&'a [Digest]),
    /// A video's digest, and where in it the episode begins.
    Video { digest: Digest, from: f64 },
}

impl Pictures<'_> {
    /// The digest of a frame of the episode, which stands in this row of its data file.
    fn digest(&self, row: usize, frame: u64) -> Option<Digest> {
        match self {
            Self::Images(digests) => there(digests.get(row)?),
            Self::Video { digest, from } => Some(of_frame(digest, *from, frame)),
        }
    }
}

fn there(digest: &Digest) -> Option<Digest> {
    (*digest != NONE).then_some(*digest)
}

/// Names an object of a bucket by its address and what the bucket says of its version; none for a file.
fn of_object(path: &Path) -> Result<Option<Digest>, DataError> {
    let version = place::version(path)?;
    Ok(version.map(|version| Digest::of(OBJECT_DOMAIN, [("version", &version[..])])))
}

/// Names the image of a row of an object.
fn of_row(object: &Digest, camera: &str, row: u64) -> Digest {
    let row = row.to_le_bytes();
    Digest::of(OBJECT_ROW_DOMAIN, [("object", &object.0[..]), ("camera", camera.as_bytes()), ("row", &row)])
}

/// Names frame `frame` of an episode that begins `from` seconds into the video of digest `video`.
pub(super) fn of_frame(video: &Digest, from: f64, frame: u64) -> Digest {
    let (from, frame) = (from.to_bits().to_le_bytes(), frame.to_le_bytes());
    Digest::of(FRAME_DOMAIN, [("video", &video.0[..]), ("from", &from), ("frame", &frame)])
}

/// Digests by file and column, or by video and camera.
type Tables = std::collections::HashMap<(u32, String), Arc<[Digest]>>;

/// A task index in the place of a digest; never [`NONE`].
fn of_task(index: i64) -> Digest {
    let mut bytes = [1; 32];
    bytes[..8].copy_from_slice(&index.to_le_bytes());
    Digest(bytes)
}

fn task_of(digest: Digest) -> Option<i64> {
    digest.0.first_chunk().map(|bytes| i64::from_le_bytes(*bytes))
}
