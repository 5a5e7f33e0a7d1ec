//! Names of samples by content, for the feature store: the encoded images in camera order, and the rendered prompt.
//!
//! ```text
//! image bytes ── digest, by row and camera, remembered by file ─┐
//! task_index ──────────────── remembered by file ── prompt ─────┴─▶ SampleKey, by sample
//! ```
//!
//! Reading and hashing all images of a data set takes as long as the disk gives them. It is done once, by one of the processes of a node,
//! on all its cores; later launches find the digests in the store's memo as long as the data files have not changed. Only what depends
//! on the file is remembered: another prompt or another choice of cameras makes other keys from the same digests.
//!
//! In memory: 33 bytes a frame; while they are made, 32 more for each camera and one for the task, which the memo shares.
//!
//! A sample that cannot be read has no key: it is a miss, and fails where samples are read, as it would without a store. Whether it is lost
//! or the disk was away for a moment is not known, so a column that could not be read as a whole is not remembered.

use std::{
    ops::Range,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use super::dataset::Dataset;
use coxswain_data::{DataError, lerobot::rows::Part};
use coxswain_feature_store::{Digest, Memo, SampleKey, Stamp, Store, StoreError};
use coxswain_nn::pulse;
use coxswain_task::SampleKeys;

/// Rows that a thread takes at once: several windows of the row store, so that few are decoded by two threads.
const STRIPE: u64 = 512;
/// Stands for a row that could not be read.
const NONE: Digest = Digest([0; 32]);
/// The column of task indices among those of cameras, whose names are features and so contain no space.
const TASKS: &str = "task index";

/// One column of one data file, to be read.
struct Task {
    file: u32,
    path: PathBuf,
    stamp: Stamp,
    part: Part,
    name: String,
    found: Mutex<Vec<Digest>>,
    /// Some rows could not be read.
    failed: AtomicBool,
}

impl Task {
    /// These rows could not be read. The first time that is said: where a whole file is lost there are thousands.
    fn fails(&self, rows: Range<u64>, error: &DataError) {
        let Range { start, end } = rows;
        if !self.failed.swap(true, Ordering::Relaxed) {
            let (path, name) = (self.path.display(), &self.name);
            tracing::warn!(
                %error,
                "{path}: rows {start}..{end} of {name} cannot be read for the cache, and perhaps others: their features are computed every time; the next launch tries again"
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
            let digests: Arc<[_]> = task.found.into_inner().unwrap_or_else(PoisonError::into_inner).into();
            if !task.failed.into_inner() {
                memo.put(&task.path, &task.name, task.stamp, digests.clone());
            }
            tables.insert((task.file, task.name), digests);
        }
        // What cannot be remembered is read again next time.
        if let Err(error) = memo.save() {
            tracing::warn!(%error, "digests of the data set's images are not remembered");
        }
        Ok(SampleKeys::new(self.assemble(&tables), images_read))
    }

    /// The key of one sample, from its data file.
    pub fn sample_key(&self, index: u64) -> Result<SampleKey, DataError> {
        let found = self.catalog.episodes.of_sample(index);
        let (_, episode) = found.ok_or(DataError::OutOfRange { what: "sample", index, len: self.len() })?;
        let row = episode.first_row + index - episode.start;
        let read = |part| self.rows.block(&self.catalog, episode.file, row, part);
        let fault =
            |feature: &str, fault: &str| self.catalog.row_error(episode.file, row, feature, fault.into());
        let mut images = Vec::new();
        for (i, camera) in self.cameras.iter().enumerate() {
            let block = read(Part::Camera(i))?;
            let encoded = block.image(row).ok_or_else(|| fault(&camera.name, "no image bytes in the row"))?;
            images.push(Digest::of_image(encoded));
        }
        let numbers = read(Part::Numbers)?;
        let task = usize::try_from(numbers.keys[2][(row - numbers.first_row) as usize]).ok();
        let text = task.and_then(|task| self.catalog.tasks.get(task)?.as_deref());
        let text = text.ok_or_else(|| fault("task_index", "its task has no text in meta/tasks"))?;
        Ok(SampleKey::new(&images, &self.prompt.render(text)))
    }

    /// How images become the model's input, in words: an ingredient of every space.
    pub fn preprocessing(&self) -> String {
        self.images.describe()
    }

    /// What stands around the task in every prompt: an ingredient of every space.
    pub fn prompt_template(&self) -> String {
        self.prompt.template()
    }

    /// The columns that the memo knows, and those that must be read.
    fn remembered(&self, memo: &Memo, root: &Path) -> (Tables, Vec<Task>) {
        let (mut tables, mut tasks) = (Tables::new(), Vec::new());
        let cameras =
            self.cameras.iter().enumerate().map(|(i, camera)| (Part::Camera(i), camera.name.as_str()));
        let columns: Vec<_> = cameras.chain([(Part::Numbers, TASKS)]).collect();
        for file in 0..self.catalog.episodes.files.len() as u32 {
            // A file that cannot be found or read leaves its samples without keys.
            let Ok(path) = self.catalog.data_path(file) else { continue };
            let path = path.strip_prefix(&self.catalog.root).map_or(path.clone(), |below| root.join(below));
            let Ok(stamp) = Stamp::of(&path) else { continue };
            let rows = self.catalog.episodes.files[file as usize].rows as usize;
            for (part, name) in &columns {
                match memo.get(&path, name).filter(|digests| digests.len() == rows) {
                    Some(digests) => {
                        tables.insert((file, (*name).to_owned()), digests);
                    }
                    None => tasks.push(Task {
                        file,
                        path: path.clone(),
                        stamp,
                        part: *part,
                        name: (*name).to_owned(),
                        found: Mutex::new(vec![NONE; rows]),
                        failed: AtomicBool::new(false),
                    }),
                }
            }
        }
        (tables, tasks)
    }

    /// Reads columns on all cores; returns how many images were hashed.
    fn read_columns(&self, tasks: &[Task]) -> u64 {
        let stripes: Vec<(&Task, u64)> = tasks
            .iter()
            .flat_map(|task| {
                let rows = self.catalog.episodes.files[task.file as usize].rows;
                (0..rows).step_by(STRIPE as usize).map(move |first| (task, first))
            })
            .collect();
        let (next, images) = (AtomicU64::new(0), AtomicU64::new(0));
        let work = || {
            while let Some((task, first)) = stripes.get(next.fetch_add(1, Ordering::Relaxed) as usize) {
                pulse::beat();
                let found = self.read_stripe(task, *first);
                if task.part != Part::Numbers {
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

    /// Digests of some rows of a column, [`NONE`] for those that cannot be read.
    fn read_stripe(&self, task: &Task, first: u64) -> Vec<Digest> {
        let end = (first + STRIPE).min(self.catalog.episodes.files[task.file as usize].rows);
        let mut found = Vec::with_capacity((end - first) as usize);
        let mut row = first;
        while row < end {
            let block = match self.rows.block(&self.catalog, task.file, row, task.part) {
                Ok(block) => block,
                Err(error) => {
                    // The windows after it may be sound, but where they begin is not known without it; the next stripe finds its own.
                    task.fails(row..end, &error);
                    found.resize((end - first) as usize, NONE);
                    break;
                }
            };
            let last = end.min(block.first_row + block.rows as u64);
            for row in row..last {
                found.push(match task.part {
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
        let prompts: Vec<Option<String>> = self
            .catalog
            .tasks
            .iter()
            .map(|task| task.as_deref().map(|text| self.prompt.render(text)))
            .collect();
        let mut keys = Vec::with_capacity(self.len() as usize);
        for episode in &self.catalog.episodes.episodes {
            let column = |name: &str| tables.get(&(episode.file, name.to_owned()));
            let cameras: Option<Vec<_>> = self.cameras.iter().map(|camera| column(&camera.name)).collect();
            let (cameras, tasks) = (cameras.unwrap_or_default(), column(TASKS));
            for row in episode.first_row as usize..(episode.first_row + episode.length) as usize {
                let at = |column: &Arc<[Digest]>| column.get(row).copied().filter(|digest| *digest != NONE);
                let images: Option<Vec<_>> = cameras.iter().map(|camera| at(camera)).collect();
                let task = tasks.and_then(at).and_then(task_of);
                let prompt = task.and_then(|task| prompts.get(task)?.as_deref());
                let images = images.filter(|images| images.len() == self.cameras.len());
                keys.push(images.zip(prompt).map(|(images, prompt)| SampleKey::new(&images, prompt)));
            }
        }
        keys
    }
}

/// Digests by data file and column.
type Tables = std::collections::HashMap<(u32, String), Arc<[Digest]>>;

/// A task index in the place of a digest; never [`NONE`].
fn of_task(index: i64) -> Digest {
    let mut bytes = [1; 32];
    bytes[..8].copy_from_slice(&index.to_le_bytes());
    Digest(bytes)
}

fn task_of(digest: Digest) -> Option<usize> {
    let bytes: [u8; 8] = digest.0[..8].try_into().ok()?;
    usize::try_from(i64::from_le_bytes(bytes)).ok()
}
