//! The samples of one micro-batch, with features from the store where it has them.
//!
//! ```text
//! no store      numbers, images, prompt of every sample                      as always
//! hit           numbers from the data set; prompt, grids and features from the record: no image is decoded, nothing is tokenized
//! miss          numbers, images, prompt; its features are left to the trainer, with room kept for them
//! ```
//!
//! A record that does not match its checksum is a miss, named once by whoever takes the micro-batch. What this file does not do: compute
//! features, or write any.

use std::{
    fmt,
    ops::Range,
    sync::Arc,
    time::{Duration, Instant},
};

use coxswain_proto::ids::Step;

use super::collate::collate;
use super::dataset::Dataset;
use super::error::DataError;
use super::keys::SampleKeys;
use crate::batch::{CachedFeatures, MicroBatch, Sample};
use crate::vl_cache::{SampleKey, Space};

/// Where the features of a step's samples come from, if they are there.
#[derive(Clone)]
pub struct KeptFeatures {
    /// The space of the store that holds what this model would compute; none if there is no place for one.
    pub space: Option<Space>,
    /// The key of every sample.
    pub keys: Arc<SampleKeys>,
    /// Which tokens have features, and how many values each.
    pub shape: FeatureShape,
}

impl fmt::Debug for KeptFeatures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeptFeatures").field("shape", &self.shape).finish_non_exhaustive()
    }
}

/// Which tokens of a sample have features, and how many values each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FeatureShape {
    /// Values of a token.
    pub width: usize,
    /// Patches that make one image token, where only those have features (the vision tap); none where all tokens have.
    pub merged_patches: Option<usize>,
}

impl FeatureShape {
    /// Tokens of a sample that have features.
    pub fn tokens(&self, input_ids: &[u32], image_grids: &[[u32; 3]]) -> usize {
        match self.merged_patches {
            Some(merged) => {
                let patches = |grid: &[u32; 3]| grid.iter().map(|&side| side as usize).product::<usize>();
                image_grids.iter().map(|grid| patches(grid) / merged.max(1)).sum()
            }
            None => input_ids.len(),
        }
    }
}

/// A micro-batch, and what is still to be done for it.
#[derive(Debug, Default)]
pub struct Prepared {
    /// The rows. If features are asked for there are no pixels, and room for the features of missing rows.
    pub batch: MicroBatch,
    /// Rows whose features are to be computed, in order.
    pub missing: Vec<Missing>,
    /// Rows whose features were computed while the micro-batch waited.
    pub computed_ahead: usize,
    /// Time spent reading features.
    pub read: Duration,
    /// What was found damaged, for people.
    pub damaged: Vec<String>,
}

/// A row whose features the store does not have.
#[derive(Clone, Debug, PartialEq)]
pub struct Missing {
    /// The place of its features among the values of the micro-batch.
    pub place: Range<usize>,
    /// Under which its features are kept; none if its file could not be read when keys were made.
    pub key: Option<SampleKey>,
    /// Prompt and pixels; the numbers are in the micro-batch alone.
    pub seen: Sample,
}

impl Dataset {
    /// The micro-batch of these samples, `indices` in order; with room for features if `kept` says where they are from. A sample that
    /// cannot be used is named by its place in `indices`.
    pub fn prepare(
        &self,
        step: Step,
        indices: &[u64],
        kept: Option<&KeptFeatures>,
    ) -> Result<Prepared, (usize, DataError)> {
        let Some(kept) = kept else {
            let sample = |(place, &index)| self.sample(index).map_err(|error| (place, error));
            let samples = indices.iter().enumerate().map(sample).collect::<Result<Vec<_>, _>>()?;
            return Ok(Prepared { batch: collate(step, &samples, self.pad_token()), ..Prepared::default() });
        };
        let mut rows = Rows::new(self, kept);
        for (row, &index) in indices.iter().enumerate() {
            rows.add(index).map_err(|error| (row, error))?;
        }
        Ok(rows.finish(step))
    }
}

/// Rows with features, as they come together.
struct Rows<'a> {
    dataset: &'a Dataset,
    kept: &'a KeptFeatures,
    samples: Vec<Sample>,
    /// Features of the rows so far, zero where they are missing.
    values: Vec<f32>,
    prepared: Prepared,
}

impl<'a> Rows<'a> {
    fn new(dataset: &'a Dataset, kept: &'a KeptFeatures) -> Self {
        Self { dataset, kept, samples: Vec::new(), values: Vec::new(), prepared: Prepared::default() }
    }

    fn add(&mut self, index: u64) -> Result<(), DataError> {
        let key = self.kept.keys.get(index);
        let sample = match key.and_then(|key| self.read(&key)) {
            Some((input_ids, image_grids)) => {
                Sample { input_ids, image_grids, ..self.dataset.sample_unseen(index)? }
            }
            None => {
                let mut sample = self.dataset.sample(index)?;
                let tokens = self.kept.shape.tokens(&sample.input_ids, &sample.image_grids);
                let place = self.make_room(tokens);
                let seen = Sample {
                    input_ids: sample.input_ids.clone(),
                    image_grids: sample.image_grids.clone(),
                    pixel_values: std::mem::take(&mut sample.pixel_values),
                    ..sample.without_content()
                };
                self.prepared.missing.push(Missing { place, key, seen });
                sample
            }
        };
        self.samples.push(sample);
        Ok(())
    }

    /// Reads the record of a sample to the end of the features, if there is one and it is sound. Returns its prompt and grids.
    fn read(&mut self, key: &SampleKey) -> Option<(Vec<u32>, Vec<[u32; 3]>)> {
        let began = Instant::now();
        let record = self.kept.space.as_ref()?.get(key)?;
        let place = self.make_room(record.tokens());
        let read = record.read_f32(&mut self.values[place.clone()]);
        self.prepared.read += began.elapsed();
        match read {
            Ok(()) => Some((record.input_ids().to_vec(), record.image_grids().to_vec())),
            Err(damaged) => {
                self.prepared.damaged.push(damaged.to_string());
                self.values.truncate(place.start);
                None
            }
        }
    }

    fn make_room(&mut self, tokens: usize) -> Range<usize> {
        let before = self.values.len();
        self.values.resize(before + tokens * self.kept.shape.width, 0.0);
        before..self.values.len()
    }

    fn finish(self, step: Step) -> Prepared {
        let batch = collate(step, &self.samples, self.dataset.pad_token());
        let features = Some(CachedFeatures { width: self.kept.shape.width, values: self.values });
        Prepared { batch: MicroBatch { features, ..batch }, ..self.prepared }
    }
}
