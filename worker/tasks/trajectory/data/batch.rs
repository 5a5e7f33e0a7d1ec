//! An image as the extractor reads it, and images side by side: plain host memory. All are of one size.
//!
//! A batch shares the pixels of the samples that it is made of: putting one together takes no memory, so what
//! is read ahead is never there twice.

use std::sync::Arc;

use coxswain_proto::ids::Step;
use coxswain_task::{Batch, CachedFeatures, Sample};

/// An image, cut into patches.
#[derive(Clone, Debug, PartialEq)]
pub struct ImageSample {
    /// Place in the order of images.
    pub index: u64,
    /// `[patches, patch values]`, row-major; empty where its trajectories are there already.
    pub pixel_values: Arc<Vec<f32>>,
}

/// Images of one forward pass.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ImageBatch {
    /// The optimizer step that they belong to.
    pub step: Step,
    /// Places in the order of images.
    pub indices: Vec<u64>,
    /// Positions of each image.
    pub positions: usize,
    /// Pixels of each image, `[patches, patch values]`, row-major; empty where trajectories are there
    /// already.
    pub pixel_values: Vec<Arc<Vec<f32>>>,
    /// Trajectories, `[images, positions, layers, dim]`, if they are there already.
    pub features: Option<CachedFeatures>,
}

impl ImageBatch {
    /// These images, in this order.
    pub fn from_samples(step: Step, positions: usize, samples: &[&ImageSample]) -> Self {
        Self {
            step,
            indices: samples.iter().map(|sample| sample.index).collect(),
            positions,
            pixel_values: samples.iter().map(|sample| sample.pixel_values.clone()).collect(),
            features: None,
        }
    }

    /// What [`ImageBatch::from_samples`] was given.
    pub fn apart(&self) -> impl Iterator<Item = ImageSample> {
        let images = self.indices.iter().zip(&self.pixel_values);
        images.map(|(&index, pixel_values)| ImageSample { index, pixel_values: pixel_values.clone() })
    }
}

impl Sample for ImageSample {
    fn index(&self) -> u64 {
        self.index
    }

    fn take_seen(&mut self) -> Box<dyn Sample> {
        Box::new(Self { pixel_values: std::mem::take(&mut self.pixel_values), ..*self })
    }
}

impl Batch for ImageBatch {
    fn step(&self) -> Step {
        self.step
    }

    fn samples(&self) -> &[u64] {
        &self.indices
    }

    fn cells(&self) -> usize {
        self.indices.len() * self.positions
    }

    fn bytes(&self) -> u64 {
        let features = self.features.as_ref().map_or(0, |features| features.values.len());
        let pixels: usize = self.pixel_values.iter().map(|image| image.len()).sum();
        4 * (pixels + features) as u64
    }

    fn features(&self) -> Option<&CachedFeatures> {
        self.features.as_ref()
    }

    fn features_mut(&mut self) -> &mut Option<CachedFeatures> {
        &mut self.features
    }

    fn with_features(&self, features: CachedFeatures) -> Box<dyn Batch> {
        let Self { step, positions, .. } = *self;
        let indices = self.indices.clone();
        let pixel_values = vec![Arc::default(); indices.len()];
        Box::new(Self { step, indices, positions, pixel_values, features: Some(features) })
    }
}
