//! Samples, read one by one: rows and images as values that the model takes, checked.
//!
//! Whatever is wrong with a sample is an error that names it, and a decoder that panics on garbled bytes
//! (parquet, PNG and JPEG are other people's code) is one of them: the sample is at fault, not the thread.

use std::sync::Arc;

use super::augmentation::View;
use super::batch::Sample;
use super::dataset::{Camera, Dataset, FrameStorage};
use super::numeric::Numeric;
use super::recipe::Recipe;
use coxswain_data::{
    DataError,
    lerobot::{
        episodes::Episode,
        rows::{Block, Part},
    },
    pixels::Pixels,
    surviving::{DECODING, surviving},
};
use coxswain_models::pretrained::pictures::{Rgb, decode_sized, image_size};
use coxswain_task::Inputs;

/// What helps where a row lacks a number.
const REPAIR: &str = "repair the recording or delete the episode";

impl Dataset {
    /// Sample `index`, its images as they were recorded: what is evaluated and served.
    pub fn sample(&self, index: u64) -> Result<Sample, DataError> {
        let at = self.at(index)?;
        at.surviving(|| at.whole(None))
    }

    /// Sample `index` as training sees it in this epoch: its images are changed as `data.augmentation` says.
    pub fn sample_in_epoch(&self, index: u64, epoch: u64) -> Result<Sample, DataError> {
        let at = self.at(index)?;
        at.surviving(|| at.whole(Some(epoch)))
    }

    /// The numbers of sample `index`: all of it but prompt, pixels and grids, which are empty. Reads no
    /// image.
    pub fn sample_unseen(&self, index: u64) -> Result<Sample, DataError> {
        let at = self.at(index)?;
        at.surviving(|| Ok(at.unseen()?.0))
    }

    /// Sample `index` with what was kept of its prompt and grids, and no pixels; none if its prompt is not
    /// that one. It may tell the state, which the name of kept features does not say.
    pub(super) fn sample_beside(&self, index: u64, inputs: Inputs) -> Result<Option<Sample>, DataError> {
        let at = self.at(index)?;
        let (sample, task) = at.surviving(|| at.unseen())?;
        let Inputs { ids: input_ids, shapes: image_shapes } = inputs;
        let own = self.prompt.encode_observed(task, &sample.state, &image_shapes);
        let own = own.map_err(|fault| at.error("task", fault))?;
        Ok((own == input_ids).then_some(Sample { input_ids, image_shapes, ..sample }))
    }

    /// Height and width that the image of a camera in sample `index` says it has; none if that cannot be
    /// read.
    pub(super) fn stored_size(&self, index: u64, camera: &str, column: usize) -> Option<(usize, usize)> {
        let at = self.at(index).ok()?;
        let size = at.surviving(|| {
            let block = at.block(at.row(), Part::Camera(column))?;
            Ok(image_size(at.encoded(&block, camera)?))
        });
        size.ok().flatten()
    }

    pub(super) fn at(&self, index: u64) -> Result<SampleReader<'_>, DataError> {
        let found = self.catalog.episodes.of_sample(index);
        let (number, episode) =
            found.ok_or(DataError::OutOfRange { what: "sample", index, len: self.len() })?;
        Ok(SampleReader { dataset: self, index, number, episode })
    }
}

/// One sample being read.
pub(super) struct SampleReader<'a> {
    dataset: &'a Dataset,
    index: u64,
    number: u64,
    episode: Episode,
}

impl<'a> SampleReader<'a> {
    /// What `read` returns; an error that names this sample if it panics.
    pub(super) fn surviving<V>(&self, read: impl FnOnce() -> Result<V, DataError>) -> Result<V, DataError> {
        surviving(read, |fault| self.error(DECODING, fault))
    }

    /// The whole sample; of an epoch, as training sees it.
    fn whole(&self, epoch: Option<u64>) -> Result<Sample, DataError> {
        let dataset = self.dataset;
        let (mut sample, task) = self.unseen()?;
        let mut pixels = Vec::new();
        for frame in self.frames() {
            for (number, camera) in (0..).zip(&dataset.cameras) {
                let mut image = frame.image(camera)?;
                // All frames of a camera are changed in the same way, as LeRobot's transforms do it.
                if let Some((augmenter, epoch)) = dataset.recipe.augmenter.as_ref().zip(epoch) {
                    image = augmenter.apply(View { epoch, sample: self.index, camera: number }, &image);
                }
                let input = dataset.images.process(image);
                let input = input.map_err(|fault| frame.error(&camera.name, fault))?;
                sample.image_shapes.push(input.shape);
                match pixels.is_empty() {
                    true => pixels = input.pixel_values,
                    false => pixels.extend_from_slice(&input.pixel_values),
                }
            }
        }
        sample.pixel_values = pixels.into();
        let ids = dataset.prompt.encode_observed(task, &sample.state, &sample.image_shapes);
        sample.input_ids = ids.map_err(|fault| self.error("task", fault))?;
        Ok(sample)
    }

    /// Brings what reading the sample takes to the local disk.
    pub(super) fn bring(&self) -> Result<(), DataError> {
        let Dataset { catalog, rows, dims, settings, .. } = self.dataset;
        let (file, row) = (self.episode.file, self.row());
        let chunk = (dims.horizon.max(1) - 1) * settings.data.action_stride;
        let last = (row + chunk as u64).min(self.episode.first_row + self.episode.length - 1);
        rows.bring(catalog, file, last, Part::Numbers)?;
        self.frames().try_for_each(|frame| frame.bring_frame())
    }

    fn bring_frame(&self) -> Result<(), DataError> {
        let Dataset { catalog, rows, frames, cameras, .. } = self.dataset;
        let (file, row) = (self.episode.file, self.row());
        rows.bring(catalog, file, row, Part::Numbers)?;
        cameras.iter().try_for_each(|camera| match camera.stored {
            FrameStorage::Images(column) => rows.bring(catalog, file, row, Part::Camera(column)),
            FrameStorage::Video(video) => frames.bring(catalog, video, self.index),
        })
    }

    /// The frames of its history, the oldest first, and itself. What would lie before the episode's first
    /// frame is that frame, as LeRobot's `delta_timestamps` have it.
    fn frames(&self) -> impl Iterator<Item = Self> + '_ {
        let Self { dataset, index, number, episode } = *self;
        let frame = index - episode.start;
        dataset.settings.observation.rows_back().map(move |back| Self {
            dataset,
            index: index - back.min(frame),
            number,
            episode,
        })
    }

    /// What a camera shows.
    fn image(&self, camera: &Camera) -> Result<Rgb, DataError> {
        let dataset = self.dataset;
        match camera.stored {
            FrameStorage::Images(column) => {
                let block = self.block(self.row(), Part::Camera(column))?;
                let image = decode_sized(self.encoded(&block, &camera.name)?, camera.size);
                image.map_err(|fault| self.error(&camera.name, fault))
            }
            FrameStorage::Video(video) => {
                let Pixels { height, width, rgb } =
                    dataset.frames.frame(&dataset.catalog, video, self.index)?;
                Ok(Rgb { height, width, pixels: rgb })
            }
        }
    }

    fn encoded<'b>(&self, block: &'b Block, camera: &str) -> Result<&'b [u8], DataError> {
        block.image(self.row()).ok_or_else(|| {
            let fault = "no image bytes in the row; re-export with images embedded in parquet";
            self.error(camera, fault.into())
        })
    }

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
    fn keys(&self, block: &Block) -> Result<&'a str, DataError> {
        let row = self.row();
        if let Some((key, misfit)) = block.missing_key(row) {
            return Err(self.error(key, format!("{misfit}; {REPAIR}")));
        }
        let [episode, frame, task] = &block.keys.each_ref().map(|key| key[(row - block.first_row) as usize]);
        let wanted = (self.number as i64, (self.index - self.episode.start) as i64);
        if (*episode, *frame) != wanted {
            let fault = format!(
                "the row is of episode {episode}, frame {frame}: metadata and data are of different recordings; restore both from one"
            );
            return Err(self.error("episode_index, frame_index", fault));
        }
        let text = self.dataset.catalog.tasks.get(task);
        text.map(String::as_str).ok_or_else(|| {
            let fault = format!("task {task} has no text in meta/tasks; restore the task list");
            self.error("task_index", fault)
        })
    }

    /// The text of its task.
    pub(super) fn task(&self) -> Result<&'a str, DataError> {
        self.surviving(|| Ok(self.unseen()?.1))
    }

    /// The sample without prompt and images, and the text of its task.
    fn unseen(&self) -> Result<(Sample, &'a str), DataError> {
        let dataset = self.dataset;
        let numbers = self.block(self.row(), Part::Numbers)?;
        let task = self.keys(&numbers)?;
        let mut state = Vec::with_capacity(dataset.dims.state);
        if !dataset.state.is_none() {
            self.append_rows(&dataset.state, &numbers, self.frames().map(|at| at.row()), &mut state)?;
        }
        let sensor = dataset.sensor.as_ref().map_or(Ok(Vec::new()), |of| self.sensor(of, &numbers))?;
        let now = &state[state.len() - dataset.state.width..];
        let (actions, action_is_pad) = self.actions(&numbers, now)?;
        dataset.state.normalizer.apply(&mut state);
        let sample = Sample {
            index: self.index,
            episode: self.number,
            frame: self.index - self.episode.start,
            input_ids: Vec::new(),
            pixel_values: Arc::default(),
            image_shapes: Vec::with_capacity(dataset.cameras.len()),
            state,
            sensor,
            actions,
            action_width: dataset.action.width,
            action_is_pad,
        };
        Ok((sample, task))
    }

    /// The sensor's window, checked and normalised: this row's own, or the readings of the last rows. Before
    /// the episode's first row it has that row's.
    fn sensor(&self, sensor: &Numeric, block: &Arc<Block>) -> Result<Vec<f32>, DataError> {
        let window = self.dataset.settings.data.sensor.as_ref().and_then(|sensor| sensor.window);
        let mut values = Vec::with_capacity(sensor.width * window.unwrap_or(1));
        let first = self.episode.first_row;
        let rows = (0..window.unwrap_or(1) as u64).rev();
        let rows = rows.map(|back| self.row().saturating_sub(back).max(first));
        self.append_rows(sensor, block, rows, &mut values)?;
        sensor.normalizer.apply(&mut values);
        Ok(values)
    }

    /// The chunk of actions from this frame on, some of them as differences from the state as recorded; past
    /// the episode's end its last action repeats and counts as padding.
    fn actions(&self, first: &Arc<Block>, state: &[f32]) -> Result<(Vec<f32>, Vec<bool>), DataError> {
        let Dataset { action, recipe: Recipe { deltas, .. }, dims, settings, .. } = self.dataset;
        let (horizon, stride) = (dims.horizon, settings.data.action_stride);
        let left = ((self.episode.end() - self.index) as usize).div_ceil(stride);
        let mut values = Vec::with_capacity(horizon * action.width);
        let rows = (self.row()..).step_by(stride).take(horizon.min(left));
        self.append_rows(action, first, rows, &mut values)?;
        for _ in left..horizon {
            values.extend_from_within(values.len() - action.width..);
        }
        if deltas.any() {
            let offset = deltas.offset(state, action.width);
            values.iter_mut().zip(offset.iter().cycle()).for_each(|(value, offset)| *value -= offset);
        }
        action.normalizer.apply(&mut values);
        Ok((values, (0..horizon).map(|step| step >= left).collect()))
    }

    /// Values of these rows of the episode; `block` is the window of some of them.
    fn append_rows(
        &self,
        numeric: &Numeric,
        block: &Arc<Block>,
        rows: impl Iterator<Item = u64>,
        out: &mut Vec<f32>,
    ) -> Result<(), DataError> {
        let mut block = block.clone();
        for row in rows {
            if !block.holds(row) {
                block = self.block(row, Part::Numbers)?;
            }
            if let Some((feature, element, value)) = numeric.append(&block, row, out) {
                let misfit = block.misfit(row, feature).map(|misfit| misfit.to_string());
                let found = misfit.unwrap_or_else(|| format!("element {element} is {value}"));
                let fault = format!("{found}; {REPAIR}");
                return Err(self.dataset.catalog.row_error(self.episode.file, row, feature, fault));
            }
        }
        Ok(())
    }
}
