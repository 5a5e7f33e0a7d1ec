//! A data set as a run sees it: the features it names, normalised, with images as patches and the task as token ids.
//!
//! [`Dataset::open`] reads all metadata and checks it against the run: a run that would fail on its data fails here. Values are
//! checked when their sample is read: NaN and infinity, images that do not decode, rows that contradict the metadata.

use std::{collections::BTreeSet, path::Path, sync::Arc};

use coxswain_proto::run_spec::RunSpec;

use super::error::DataError;
use super::lerobot::episodes::Episode;
use super::lerobot::info::{Feature, Info};
use super::lerobot::rows::{Block, Columns, Limits, Part, RowStore};
use super::lerobot::stats::Stats;
use super::lerobot::{Catalog, Fingerprint};
use super::normalize::Normalizer;
use super::order::{SampleOrder, TrainingSamples};
use super::prompt::{ModelFacts, PromptEncoder};
use super::vision::ImageProcessor;
use crate::batch::{Sample, SampleDims};

/// Footers of data files read while opening. Beyond this (v2.1 has one file per episode) the others are checked on first use.
const FILES_CHECKED_AT_OPEN: u32 = 64;

/// A numeric feature that the model sees.
struct Numeric {
    name: String,
    /// Its place among the columns of a numeric block.
    column: usize,
    width: usize,
    normalizer: Normalizer,
}

pub(super) struct Camera {
    pub(super) name: String,
    size: (usize, usize),
}

/// An opened data set. Shared between threads; reading a sample needs no lock beyond that of the cache.
pub struct Dataset {
    pub(super) catalog: Catalog,
    pub(super) rows: RowStore,
    state: Numeric,
    sensor: Option<Numeric>,
    action: Numeric,
    pub(super) cameras: Vec<Camera>,
    pub(super) images: ImageProcessor,
    pub(super) prompt: PromptEncoder,
    dims: SampleDims,
    training: Arc<TrainingSamples>,
    holdout: BTreeSet<u64>,
    seed: u64,
}

impl Dataset {
    /// Opens the run's data set and everything that samples are made with: tokenizer, image processor, statistics.
    pub fn open(spec: &RunSpec) -> Result<Self, DataError> {
        let data = &spec.data;
        let catalog = Catalog::open(Path::new(&data.path))?;
        let info = &catalog.info;
        let mut columns = Columns { numbers: Vec::new(), cameras: data.cameras.clone() };
        let mut numeric = |key, name: &str, mode| -> Result<Numeric, DataError> {
            let feature = info.require(key, name, |f| f.is_number() && f.width() > 0)?;
            let (column, width) = (columns.numbers.len(), feature.width());
            columns.numbers.push((name.to_string(), feature.shape.clone()));
            let normalizer = Normalizer::new(&catalog, name, width, mode)?;
            Ok(Numeric { name: name.to_string(), column, width, normalizer })
        };
        let state = numeric("state", &data.state, data.normalization.state)?;
        let action = numeric("action", &data.action, data.normalization.action)?;
        let sensor = data.sensor.as_deref().map(|name| numeric("sensor", name, data.normalization.sensor));
        let sensor = sensor.transpose()?;
        let (sensor_window, sensor_channels) = match &data.sensor {
            Some(name) => sensor_shape(info, name)?,
            None => (0, 0),
        };
        let camera = |name: &String| Ok(Camera { name: name.clone(), size: camera_size(info, name)? });
        let cameras: Result<Vec<_>, DataError> = data.cameras.iter().map(camera).collect();
        let model = Path::new(&spec.model.path);
        let facts = ModelFacts::read(model)?;
        let dims = SampleDims {
            state: state.width,
            sensor_window,
            sensor_channels,
            horizon: data.horizon,
            action: action.width,
        };
        let holdout: BTreeSet<u64> = data.holdout_episodes.iter().map(|e| *e as u64).collect();
        let training = Arc::new(training_samples(&catalog, &holdout)?);
        let dataset = Self {
            rows: RowStore::new(columns, Limits::default()),
            state,
            sensor,
            action,
            cameras: cameras?,
            images: ImageProcessor::open(model, facts.patches, data)?,
            prompt: PromptEncoder::open(model, facts, &data.prompt, data.cameras.len())?,
            dims,
            training,
            holdout,
            seed: spec.run.seed,
            catalog,
        };
        dataset.check()?;
        Ok(dataset)
    }

    /// What needs the opened data set: images have a legal shape, tasks can be rendered, data files can be opened.
    fn check(&self) -> Result<(), DataError> {
        let path = &self.catalog.info.path;
        let grids = self.image_grids()?;
        if self.catalog.tasks.iter().all(Option::is_none) {
            let found = "no task text at all";
            return Err(DataError::invalid(
                &self.catalog.root.join("meta"),
                "tasks",
                found,
                "restore the tasks",
            ));
        }
        for task in self.catalog.tasks.iter().flatten().take(1) {
            self.prompt.encode(task, &grids).map_err(|e| {
                DataError::invalid(path, "data.prompt", e, "correct data.prompt or the task text")
            })?;
        }
        let files = self.catalog.episodes.files.len() as u32;
        (0..files.min(FILES_CHECKED_AT_OPEN)).try_for_each(|f| self.rows.check_file(&self.catalog, f))
    }

    /// Sizes that all samples share.
    pub fn dims(&self) -> SampleDims {
        self.dims
    }

    /// Patch grids of one sample's images, in prompt order, from the image sizes in `info.json`.
    pub fn image_grids(&self) -> Result<Vec<[u32; 3]>, DataError> {
        let grid = |camera: &Camera| {
            self.images.grid(camera.size.0, camera.size.1).map_err(|e| {
                let field = format!("features.{}", camera.name);
                DataError::invalid(&self.catalog.info.path, field, e, "use a camera of another shape")
            })
        };
        self.cameras.iter().map(grid).collect()
    }

    /// Samples, held-out ones included.
    pub fn len(&self) -> u64 {
        self.catalog.episodes.frames()
    }

    /// Never true: opening refuses an empty data set.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Samples that are trained on: one epoch.
    pub fn training_len(&self) -> u64 {
        self.training.len()
    }

    /// The training sample that has so many before it in the data set.
    pub fn training_sample(&self, rank: u64) -> Option<u64> {
        self.training.get(rank)
    }

    /// Samples of held-out episodes, in order.
    pub fn holdout(&self) -> impl Iterator<Item = u64> + '_ {
        self.holdout.iter().filter_map(|e| self.episode(*e).ok()).flat_map(|e| e.start..e.end())
    }

    /// Held-out episodes, in order.
    pub fn holdout_episodes(&self) -> impl Iterator<Item = u64> + '_ {
        self.holdout.iter().copied()
    }

    /// The samples of one episode.
    pub fn episode_samples(&self, episode: u64) -> Result<std::ops::Range<u64>, DataError> {
        self.episode(episode).map(|e| e.start..e.end())
    }

    /// Digest of the data set, by which its order of samples is keyed.
    pub fn fingerprint(&self) -> Fingerprint {
        self.catalog.fingerprint
    }

    /// The order of training samples under the run's seed.
    pub fn order(&self) -> SampleOrder {
        SampleOrder::new(self.seed, self.fingerprint(), self.training.clone())
    }

    /// The id that fills up shorter prompts of a batch.
    pub fn pad_token(&self) -> u32 {
        self.prompt.pad()
    }

    /// Model actions (`[.., action]`, normalised) back to the data set's units, in place.
    pub fn denormalize_actions(&self, actions: &mut [f32]) {
        self.action.normalizer.invert(actions);
    }

    /// Statistics of the features that the model sees, in the layout of LeRobot's `stats.json`.
    pub fn stats(&self) -> Stats {
        let names = [Some(&self.state), self.sensor.as_ref(), Some(&self.action)];
        let stats = self.catalog.stats.as_ref();
        stats.map(|s| s.only(names.into_iter().flatten().map(|n| n.name.as_str()))).unwrap_or_default()
    }

    /// Sample `index`, as training sees it.
    pub fn sample(&self, index: u64) -> Result<Sample, DataError> {
        let at = self.at(index)?;
        let (mut sample, task) = at.unseen()?;
        for (i, camera) in self.cameras.iter().enumerate() {
            let block = at.block(at.row(), Part::Camera(i))?;
            let encoded = block.image(at.row()).ok_or_else(|| {
                at.error(
                    &camera.name,
                    "no image bytes in the row; re-export with images embedded in parquet".into(),
                )
            })?;
            let patches =
                self.images.process(encoded, camera.size).map_err(|fault| at.error(&camera.name, fault))?;
            sample.image_grids.push(patches.grid);
            match sample.pixel_values.is_empty() {
                true => sample.pixel_values = patches.pixel_values,
                false => sample.pixel_values.extend_from_slice(&patches.pixel_values),
            }
        }
        sample.input_ids =
            self.prompt.encode(task, &sample.image_grids).map_err(|fault| at.error("task", fault))?;
        Ok(sample)
    }

    /// The numbers of sample `index`: all of it but prompt, pixels and grids, which are empty. Reads no image.
    pub fn sample_unseen(&self, index: u64) -> Result<Sample, DataError> {
        Ok(self.at(index)?.unseen()?.0)
    }

    fn at(&self, index: u64) -> Result<At<'_>, DataError> {
        let found = self.catalog.episodes.of_sample(index);
        let (number, episode) =
            found.ok_or(DataError::OutOfRange { what: "sample", index, len: self.len() })?;
        Ok(At { dataset: self, index, number, episode })
    }

    fn episode(&self, number: u64) -> Result<Episode, DataError> {
        let episodes = &self.catalog.episodes.episodes;
        let len = episodes.len() as u64;
        let found = usize::try_from(number).ok().and_then(|n| episodes.get(n));
        found.copied().ok_or(DataError::OutOfRange { what: "episode", index: number, len })
    }
}

pub(super) fn camera_size(info: &Info, name: &str) -> Result<(usize, usize), DataError> {
    let size = |f: &Feature| f.image_size().filter(|(h, w)| *h > 0 && *w > 0);
    let feature = info.require("cameras", name, |f| f.is_image() && size(f).is_some())?;
    Ok(size(feature).unwrap_or_default())
}

/// Window and channels; a plain vector is a window of one reading.
pub(super) fn sensor_shape(info: &Info, name: &str) -> Result<(usize, usize), DataError> {
    let one_or_two_axes = |f: &Feature| f.is_number() && matches!(f.shape.len(), 1 | 2);
    match info.require("sensor", name, one_or_two_axes)?.shape[..] {
        [window, channels] => Ok((window, channels)),
        [channels] => Ok((1, channels)),
        _ => Ok((0, 0)),
    }
}

fn training_samples(catalog: &Catalog, holdout: &BTreeSet<u64>) -> Result<TrainingSamples, DataError> {
    let episodes = &catalog.episodes.episodes;
    if let Some(missing) = holdout.iter().find(|e| **e >= episodes.len() as u64) {
        let found = format!("no episode {missing}; there are {}", episodes.len());
        let remedy = "correct data.holdout_episodes";
        return Err(DataError::invalid(&catalog.info.path, "total_episodes", found, remedy));
    }
    let kept = episodes.iter().enumerate().filter(|(n, _)| !holdout.contains(&(*n as u64)));
    let samples = TrainingSamples::new(kept.map(|(_, e)| e.start..e.end()));
    if samples.is_empty() {
        let found = "data.holdout_episodes holds every episode out";
        let remedy = "leave at least one episode to train on";
        return Err(DataError::invalid(&catalog.info.path, "total_episodes", found, remedy));
    }
    Ok(samples)
}

/// One sample being read.
struct At<'a> {
    dataset: &'a Dataset,
    index: u64,
    number: u64,
    episode: Episode,
}

impl<'a> At<'a> {
    fn row(&self) -> u64 {
        self.episode.first_row + self.index - self.episode.start
    }

    fn error(&self, feature: &str, fault: String) -> DataError {
        self.dataset.catalog.row_error(self.episode.file, self.row(), feature, fault)
    }

    fn block(&self, row: u64, part: Part) -> Result<Arc<Block>, DataError> {
        self.dataset.rows.block(&self.dataset.catalog, self.episode.file, row, part)
    }

    /// Checks that the row is the frame that the metadata promises, and returns its task.
    fn keys(&self, [episode, frame, task]: &[i64; 3]) -> Result<&'a str, DataError> {
        let wanted = (self.number as i64, (self.index - self.episode.start) as i64);
        if (*episode, *frame) != wanted {
            let fault = format!(
                "the row says episode {episode}, frame {frame}; metadata and data are of different recordings"
            );
            return Err(self.error("episode_index, frame_index", fault));
        }
        let text = usize::try_from(*task).ok().and_then(|t| self.dataset.catalog.tasks.get(t));
        text.and_then(Option::as_deref).ok_or_else(|| {
            let fault = format!("task {task} has no text in meta/tasks; restore the task list");
            self.error("task_index", fault)
        })
    }

    /// The sample without prompt and images, and the text of its task.
    fn unseen(&self) -> Result<(Sample, &'a str), DataError> {
        let dataset = self.dataset;
        let numbers = self.block(self.row(), Part::Numbers)?;
        let first = numbers.first_row;
        let task = self.keys(&numbers.keys.each_ref().map(|k| k[(self.row() - first) as usize]))?;
        let state = self.numbers(&dataset.state, &numbers)?;
        let sensor =
            dataset.sensor.as_ref().map_or(Ok(Vec::new()), |sensor| self.numbers(sensor, &numbers))?;
        let (actions, action_is_pad) = self.actions(&numbers)?;
        let sample = Sample {
            index: self.index,
            episode: self.number,
            frame: self.index - self.episode.start,
            input_ids: Vec::new(),
            pixel_values: Vec::new(),
            image_grids: Vec::with_capacity(dataset.cameras.len()),
            state,
            sensor,
            actions,
            action_is_pad,
        };
        Ok((sample, task))
    }

    /// This frame's value of a feature, checked and normalised.
    fn numbers(&self, feature: &Numeric, block: &Block) -> Result<Vec<f32>, DataError> {
        let mut values = Vec::with_capacity(feature.width);
        self.append(feature, block, self.row(), &mut values)?;
        feature.normalizer.apply(&mut values);
        Ok(values)
    }

    /// The chunk of actions from this frame on; past the episode's end its last action repeats and counts as padding.
    fn actions(&self, first: &Arc<Block>) -> Result<(Vec<f32>, Vec<bool>), DataError> {
        let action = &self.dataset.action;
        let horizon = self.dataset.dims.horizon;
        let left = (self.episode.end() - self.index) as usize;
        let mut values = Vec::with_capacity(horizon * action.width);
        let mut block = first.clone();
        for row in (self.row()..).take(horizon.min(left)) {
            if !block.holds(row) {
                block = self.block(row, Part::Numbers)?;
            }
            self.append(action, &block, row, &mut values)?;
        }
        for _ in left..horizon {
            values.extend_from_within(values.len() - action.width..);
        }
        action.normalizer.apply(&mut values);
        Ok((values, (0..horizon).map(|step| step >= left).collect()))
    }

    fn append(
        &self,
        feature: &Numeric,
        block: &Block,
        row: u64,
        out: &mut Vec<f32>,
    ) -> Result<(), DataError> {
        let from = (row - block.first_row) as usize * feature.width;
        let values = &block.numbers[feature.column][from..from + feature.width];
        if let Some(element) = values.iter().position(|v| !v.is_finite()) {
            let fault = format!(
                "element {element} is {}; repair the recording or delete the episode",
                values[element]
            );
            return Err(self.dataset.catalog.row_error(self.episode.file, row, &feature.name, fault));
        }
        out.extend_from_slice(values);
        Ok(())
    }
}
