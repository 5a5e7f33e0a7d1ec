//! What the data pipeline hands to the policy: plain host memory, no tensors, no files. The engine sees it as
//! [`coxswain_task::Sample`] and [`coxswain_task::Batch`].

use std::{ops::Range, sync::Arc};

use coxswain_models::pretrained::{
    pictures::ImageShape,
    prompts::{Prompts, Rows},
};
use coxswain_proto::ids::Step;
use coxswain_task::CachedFeatures;

use crate::vla_flow::config::Observation;

/// One training sample, preprocessed: what the model sees of one frame of one episode.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sample {
    /// Position in the data set (`index` column), which keys the sample's random draws.
    pub index: u64,
    /// `episode_index` column.
    pub episode: u64,
    /// `frame_index` column.
    pub frame: u64,
    /// Prompt with image placeholders expanded: one id per token.
    pub input_ids: Vec<u32>,
    /// Patches of all images, in prompt order: `[patches, 1176]`, row-major. Micro-batches share them.
    pub pixel_values: Arc<Vec<f32>>,
    /// `(t, h, w)` in patches, one per image.
    pub image_shapes: Vec<ImageShape>,
    /// Normalised proprioceptive state, `[state]`: that of each frame of its history, the oldest first.
    pub state: Vec<f32>,
    /// Normalised sensor window, `[window, channels]` row-major; empty without a sensor.
    pub sensor: Vec<f32>,
    /// Normalised actions, `[horizon, action]` row-major; steps past the episode's end repeat its last
    /// action.
    pub actions: Vec<f32>,
    /// Values of an action that count; what follows them is padding to the widest of a mixture.
    pub action_width: usize,
    /// `[horizon]`; true where the action lies past the episode's end and must not count.
    pub action_is_pad: Vec<bool>,
}

impl Sample {
    /// Whether each frame that a sample with this history has, the oldest first, would lie before the
    /// episode's first frame and is that one instead.
    pub fn frame_is_pad(&self, history: &Observation) -> Vec<bool> {
        history.rows_back().map(|back| back > self.frame).collect()
    }

    /// Where it stands in the data set, and nothing else.
    pub fn without_content(&self) -> Self {
        Self { index: self.index, episode: self.episode, frame: self.frame, ..Self::default() }
    }
}

/// Sizes that are the same for every sample of a data set; of a mixture the widest, to which others are
/// padded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SampleDims {
    /// Length of the state vector, of all frames that a sample has; 0 without a state.
    pub state: usize,
    /// Sensor window length; 0 without a sensor.
    pub sensor_window: usize,
    /// Sensor channels; 0 without a sensor.
    pub sensor_channels: usize,
    /// Actions per chunk.
    pub horizon: usize,
    /// Length of an action.
    pub action: usize,
}

/// These values of so many frames or actions, each padded with zeros to a width.
pub fn widened(values: &[f32], rows: usize, width: usize) -> Vec<f32> {
    let own = values.len() / rows.max(1);
    let mut wide = vec![0.0; rows * width];
    if own > 0 && width > 0 {
        for (place, row) in wide.chunks_exact_mut(width).zip(values.chunks_exact(own)) {
            place[..own].copy_from_slice(row);
        }
    }
    wide
}

impl SampleDims {
    /// The sizes in which samples of either have room.
    pub fn widest(self, other: Self) -> Self {
        Self { state: self.state.max(other.state), action: self.action.max(other.action), ..self }
    }
}

/// Samples of one forward pass on one rank, sequences padded to the longest.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MicroBatch {
    /// The optimizer step it belongs to.
    pub step: Step,
    /// The samples' `index`, in batch order.
    pub sample_indices: Vec<u64>,
    /// `[b, s]` row-major, padded on the left as VLA prompts are.
    pub input_ids: Vec<u32>,
    /// Valid tokens of each row; `b` ranges within `0..s`.
    pub valid: Vec<Range<u32>>,
    /// Padded sequence length, `s`.
    pub seq_len: usize,
    /// `[patches, 1176]` of all images of each row; empty where features come in their place.
    pub pixel_values: Vec<Arc<Vec<f32>>>,
    /// One per image, in order of rows, then prompt order.
    pub image_shapes: Vec<ImageShape>,
    /// Images of each row.
    pub images_per_row: Vec<u32>,
    /// `[b, state]`.
    pub state: Vec<f32>,
    /// `[b, window, channels]`.
    pub sensor: Vec<f32>,
    /// `[b, horizon, action]`.
    pub actions: Vec<f32>,
    /// `[b]`, values of each row's actions that count.
    pub action_widths: Vec<usize>,
    /// `[b, horizon]`, 1 where the action counts.
    pub action_valid: Vec<f32>,
    /// Features to use instead of the pixels and of what they pass through, for every row; none where the
    /// model computes its own.
    pub features: Option<CachedFeatures>,
}

impl MicroBatch {
    /// So many rows of these tokens, images and sizes, with zeros for values and without pixels: megabytes a
    /// row, which nothing reads where only sizes count.
    pub fn of_zeros(rows: usize, ids: &[u32], images: &[ImageShape], dims: SampleDims) -> Self {
        let floats = |each: usize| vec![0.0; rows * each];
        Self {
            step: Step(1),
            sample_indices: (0..rows as u64).collect(),
            valid: vec![0..ids.len() as u32; rows],
            seq_len: ids.len(),
            input_ids: ids.repeat(rows),
            pixel_values: Vec::new(),
            image_shapes: images.repeat(rows),
            images_per_row: vec![images.len() as u32; rows],
            state: floats(dims.state),
            sensor: floats(dims.sensor_window * dims.sensor_channels),
            actions: floats(dims.horizon * dims.action),
            action_widths: vec![dims.action; rows],
            action_valid: vec![1.0; rows * dims.horizon],
            features: None,
        }
    }

    /// Rows in the batch.
    pub fn len(&self) -> usize {
        self.sample_indices.len()
    }

    /// True when no sample is left for this rank.
    pub fn is_empty(&self) -> bool {
        self.sample_indices.is_empty()
    }

    /// What the vision-language model reads of it.
    pub fn prompts(&self) -> Prompts<'_> {
        Prompts {
            input_ids: &self.input_ids,
            rows: Rows::Padded(&self.valid),
            images: &self.image_shapes,
            pixel_values: &self.pixel_values,
        }
    }

    /// Bytes of its values.
    pub fn bytes(&self) -> u64 {
        let floats = [&self.state, &self.sensor, &self.actions, &self.action_valid];
        let features = self.features.as_ref().map(|features| &features.values);
        let pixels = self.pixel_values.iter().map(|row| &**row);
        let floats: usize = floats.into_iter().chain(features).chain(pixels).map(Vec::len).sum();
        4 * (floats + self.input_ids.len()) as u64
    }

    /// Tokens that are not padding.
    pub fn tokens(&self) -> u64 {
        self.valid.iter().map(|r| u64::from(r.end - r.start)).sum()
    }
}
