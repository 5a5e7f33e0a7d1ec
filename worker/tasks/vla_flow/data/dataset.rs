//! A data set as a run sees it: the features it names, normalised, with images as patches and the task as
//! token ids.
//!
//! [`Dataset::from_spec`] reads all metadata and checks it against the run: a run that would fail on its data
//! fails here. Values are checked when their sample is read: NaN and infinity, images that do not decode,
//! rows that contradict the metadata.

use std::{path::Path, slice, sync::Arc};

use crate::{
    settings::checked,
    vla_flow::{base::InputMakers, config::VlaSettings},
};
use coxswain_proto::order::DamagedRow;
use coxswain_proto::run_spec::RunSpec;

use coxswain_data::{
    DataError, Decoding, Fingerprint, SampleOrder, TrainingSamples,
    lerobot::{
        Catalog,
        episodes::Episode,
        feature::Feature,
        frames::FrameStore,
        info::Info,
        rows::{Columns, Limits, RowStore},
        stats::Stats,
    },
};
use coxswain_models::{
    Shelf,
    pretrained::pictures::{ImageProcessor, ImageShape},
    vision_language::PromptEncoder,
};
use coxswain_nn::kernels::sizes::Sizes;

use super::{
    batch::SampleDims,
    deltas::{LearnedActions, RecordedNumbers},
    numeric::Numeric,
    opening::check_files,
    recipe::Recipe,
    selection::Selection,
    sizes::{camera_size, check_reach, prompt_form, sensor_shape},
};

/// Footers of data files read while opening, and tables of each camera's videos. Beyond this (v2.1 has one
/// file per episode) the others are checked on first use.
const FILES_CHECKED_AT_OPEN: usize = 64;

pub(super) struct Camera {
    pub(super) name: String,
    pub(super) size: (usize, usize),
    pub(super) stored: FrameStorage,
}

/// How a camera's frames are stored.
#[derive(Clone, Copy)]
pub(super) enum FrameStorage {
    /// Encoded one by one, in this camera column of the data files.
    Images(usize),
    /// As this camera of the videos.
    Video(usize),
}

/// An opened data set. Shared between threads; reading a sample needs no lock beyond that of the cache.
pub struct Dataset {
    pub(super) catalog: Catalog,
    pub(super) rows: RowStore,
    pub(super) frames: FrameStore,
    pub(super) state: Numeric,
    /// The sensor of one reading, or of a window where rows have windows of their own.
    pub(super) sensor: Option<Numeric>,
    pub(super) action: Numeric,
    pub(super) recipe: Recipe,
    pub(super) cameras: Vec<Camera>,
    pub(super) images: Box<dyn ImageProcessor>,
    pub(super) prompt: Box<dyn PromptEncoder>,
    pub(super) dims: SampleDims,
    pub(super) training: Arc<TrainingSamples>,
    pub(super) settings: VlaSettings,
    pub(super) selection: Selection,
    seed: u64,
}

impl Dataset {
    /// Opens the run's data set and everything that samples are made with: tokenizer, image processor,
    /// statistics.
    pub fn from_spec(spec: &RunSpec, models: Shelf<Sizes>) -> Result<Self, DataError> {
        Self::open_beside(spec, models, 1, None)
    }

    /// Opens the run's data set as one of so many, which share what memory there is for rows, and a
    /// tokenizer: that of a set of the same model that is open already.
    pub(super) fn open_beside(
        spec: &RunSpec,
        models: Shelf<Sizes>,
        sets: usize,
        other: Option<&Self>,
    ) -> Result<Self, DataError> {
        let vla = checked(VlaSettings::from_spec(spec))?;
        let data = &vla.data;
        let catalog = Catalog::open(Path::new(&spec.data.path))?;
        let info = &catalog.info;
        let Cameras { cameras, images, videos } = Cameras::from_info(info, &data.cameras)?;
        let frames = FrameStore::new(&catalog, &videos)?;
        let mut columns = Columns { numbers: Vec::new(), cameras: images };
        let mut numeric =
            |key, names: &[String], mode| Numeric::from_catalog(&catalog, &mut columns, key, names, mode);
        let modes = data.normalization;
        let state = numeric("state", data.state.names(), modes.state)?;
        let action = numeric("action", data.action.names(), modes.action)?;
        let sensor = data.sensor.as_ref().map(|of| numeric("sensor", slice::from_ref(&of.key), modes.sensor));
        let sensor = sensor.transpose()?;
        let (sensor_window, sensor_channels) = sensor_shape(info, data.sensor.as_ref())?;
        check_reach(&catalog, &vla)?;
        let makers = InputMakers::from_settings(&vla, models)?;
        let dims = SampleDims {
            state: state.width * vla.observation.frames(),
            sensor_window,
            sensor_channels,
            horizon: data.horizon,
            action: action.width,
        };
        let selection = Selection::from_catalog(&catalog, data, &spec.data.holdout_episodes)?;
        let training = Arc::new(selection.training(&catalog));
        let form = prompt_form(&vla);
        let prompt = match other {
            Some(other) => other.prompt.like(&form),
            None => makers.prompts(&form)?,
        };
        let limits = Limits::default();
        let limits = Limits { cache_bytes: limits.cache_bytes / sets.max(1), ..limits };
        let mut dataset = Self {
            rows: RowStore::new(columns, limits),
            frames,
            recipe: Recipe::new(data, spec.run.seed),
            state,
            sensor,
            action,
            cameras,
            images: makers.images(&vla)?,
            prompt,
            dims,
            training,
            selection,
            seed: spec.run.seed,
            catalog,
            settings: vla,
        };
        check(&dataset)?;
        let Self { catalog, rows, state, action, recipe, settings, .. } = &dataset;
        let recorded = RecordedNumbers { catalog, rows, state, action, run: Path::new(&spec.run.output_dir) };
        if let Some(LearnedActions { normalizer, stats }) =
            recorded.learned(&recipe.deltas, &settings.data)?
        {
            dataset.rows.forget();
            dataset.action.normalizer = normalizer;
            dataset.recipe.action_stats = Some(stats);
        }
        Ok(dataset)
    }

    /// What the decoders of its videos have done so far.
    pub fn decoding(&self) -> Decoding {
        self.frames.counts()
    }

    /// Sizes that all samples share.
    pub fn dims(&self) -> SampleDims {
        self.dims
    }

    /// Shapes of one sample's images, in prompt order, from the image sizes in `info.json`.
    pub fn image_shapes(&self) -> Result<Vec<ImageShape>, DataError> {
        let shape = |camera: &Camera| {
            self.images.shape(camera.size.0, camera.size.1).map_err(|e| {
                let field = format!("features.{}", camera.name);
                DataError::invalid(&self.catalog.info.path, field, e, "use a camera of another shape")
            })
        };
        let of_a_frame = self.cameras.iter().map(shape).collect::<Result<Vec<_>, _>>()?;
        Ok(of_a_frame.repeat(self.settings.observation.frames()))
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

    /// The samples that are trained on, episode by episode.
    pub(super) fn training_ranges(&self) -> impl Iterator<Item = std::ops::Range<u64>> + '_ {
        let episodes = self.catalog.episodes.episodes.iter();
        // An episode is trained on as a whole, or not at all.
        let kept = episodes.filter(|episode| self.training.number(episode.start).is_some());
        kept.map(|episode| episode.start..episode.end())
    }

    /// Samples of held-out episodes, in order.
    pub fn holdout(&self) -> impl Iterator<Item = u64> + '_ {
        self.selection.holdout.iter().filter_map(|e| self.episode(*e).ok()).flat_map(|e| e.start..e.end())
    }

    /// Held-out episodes, in order.
    pub fn holdout_episodes(&self) -> impl Iterator<Item = u64> + '_ {
        self.selection.holdout.iter().copied()
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

    /// `run.seed`.
    pub(super) fn seed(&self) -> u64 {
        self.seed
    }

    /// The id that fills up shorter prompts of a batch.
    pub fn pad_token(&self) -> u32 {
        self.prompt.pad()
    }

    /// Model actions (`[.., action]`, normalised) back to the data set's units, in place.
    pub fn denormalize_actions(&self, actions: &mut [f32]) {
        self.action.normalizer.invert(actions);
    }

    /// Statistics of the features that the model sees, of actions as they are learned, in the layout of
    /// LeRobot's `stats.json`.
    pub fn stats(&self) -> Stats {
        let features = [Some(&self.state), self.sensor.as_ref(), Some(&self.action)];
        let of =
            |numeric: &Numeric| Some((numeric.name.clone(), numeric.stats(self.catalog.stats.as_ref()?)?));
        let mut stats = Stats(features.into_iter().flatten().filter_map(of).collect());
        if let Some(of_actions) = &self.recipe.action_stats {
            stats.0.insert(self.action.name.clone(), of_actions.clone());
        }
        stats
    }

    /// What of the data set is to blame that sample `index` cannot be used, and which other samples need it:
    /// a row of actions is needed by every sample whose chunk reaches it, anything else by its own sample
    /// and by those that look back as far.
    pub fn damaged_row(&self, index: u64, fault: &DataError) -> DamagedRow {
        let (row, feature) = match fault {
            DataError::Sample { index: row, feature, .. } => (*row, feature.as_str()),
            _ => (index, ""),
        };
        let chunk = (self.dims.horizon.max(1) - 1) * self.settings.data.action_stride;
        let ahead = if self.action.has(feature) { chunk as u64 } else { 0 };
        let window = self.settings.data.sensor.as_ref().and_then(|sensor| sensor.window);
        let of_window = self.sensor.as_ref().is_some_and(|sensor| sensor.has(feature));
        let of_frames = self.state.has(feature) || self.cameras.iter().any(|camera| camera.name == feature);
        let back = match window.filter(|_| of_window) {
            Some(rows) => rows as u64 - 1,
            None if of_frames => self.settings.observation.reach(),
            None => 0,
        };
        let episode = self.catalog.episodes.of_sample(row);
        let (start, end) = episode.map_or((row, row + 1), |(_, episode)| (episode.start, episode.end()));
        let first = row.saturating_sub(ahead).max(start);
        let last = (row + back).min(end - 1);
        let number = |sample| self.training.number(sample);
        // Episodes train as a whole; what is held out is not asked for here.
        let numbers = number(first.min(index)).zip(number(last.max(index)));
        let (begin, last) = numbers.unwrap_or_default();
        DamagedRow { row, begin, end: last + 1 }
    }

    fn episode(&self, number: u64) -> Result<Episode, DataError> {
        let episodes = &self.catalog.episodes.episodes;
        let len = episodes.len() as u64;
        let found = usize::try_from(number).ok().and_then(|n| episodes.get(n));
        found.copied().ok_or(DataError::OutOfRange { what: "episode", index: number, len })
    }
}

/// What needs the opened data set: images have a legal shape, tasks can be rendered, data files can be
/// opened.
fn check(dataset: &Dataset) -> Result<(), DataError> {
    let path = &dataset.catalog.info.path;
    let shapes = dataset.image_shapes()?;
    if dataset.catalog.tasks.is_empty() {
        let found = "no task text at all";
        return Err(DataError::invalid(
            &dataset.catalog.root.join("meta"),
            "tasks",
            found,
            "restore the tasks",
        ));
    }
    for task in dataset.catalog.tasks.values().take(1) {
        dataset.prompt.encode(task, &shapes).map_err(|e| {
            DataError::invalid(path, "data.prompt", e, "correct data.prompt or the task text")
        })?;
    }
    check_files(&dataset.catalog, &dataset.rows, &dataset.frames, &dataset.selection, FILES_CHECKED_AT_OPEN)?;
    let checked = dataset.cameras.iter().try_for_each(|camera| match camera.stored {
        FrameStorage::Images(column) => check_images(dataset, camera, column),
        FrameStorage::Video(_) => Ok(()),
    });
    // An opened data set holds its metadata, and windows only of what is read next.
    dataset.rows.forget();
    checked
}

/// Images have the size that `info.json` says: some of them, from the whole of the data set. What cannot
/// be read here is for the step that needs it, and one image of another size for its sample; only if all
/// differ is the metadata wrong.
fn check_images(dataset: &Dataset, camera: &Camera, column: usize) -> Result<(), DataError> {
    let Camera { name, size, .. } = camera;
    let last = dataset.training_len() - 1;
    // Lazily: the first one is at the beginning of its file, and others may be a file away in a bucket.
    let mut others = None;
    for index in [0, last / 2, last].into_iter().filter_map(|rank| dataset.training_sample(rank)) {
        match dataset.stored_size(index, name, column) {
            Some(seen) if seen == *size => return Ok(()),
            seen => others = others.or(seen),
        }
    }
    match others {
        Some((height, width)) => {
            let found =
                format!("{}x{} (height x width), but its images are {height}x{width}", size.0, size.1);
            let remedy = "correct the feature's shape, or its `names`, which give the order of the axes";
            Err(DataError::invalid(
                &dataset.catalog.info.path,
                format!("features.{name}.shape"),
                found,
                remedy,
            ))
        }
        None => Ok(()),
    }
}

/// The run's cameras.
struct Cameras<'a> {
    cameras: Vec<Camera>,
    /// Names of those that are columns of images.
    images: Vec<String>,
    /// Names of those that are videos.
    videos: Vec<&'a str>,
}

impl<'a> Cameras<'a> {
    fn from_info(info: &Info, names: &'a [String]) -> Result<Self, DataError> {
        let mut of = Self { cameras: Vec::new(), images: Vec::new(), videos: Vec::new() };
        for name in names {
            let size = camera_size(info, name)?;
            let stored = if info.feature(name).is_some_and(Feature::is_video) {
                of.videos.push(name.as_str());
                FrameStorage::Video(of.videos.len() - 1)
            } else {
                of.images.push(name.clone());
                FrameStorage::Images(of.images.len() - 1)
            };
            of.cameras.push(Camera { name: name.clone(), size, stored });
        }
        Ok(of)
    }
}
