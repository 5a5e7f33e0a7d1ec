//! A segment as training sees it, and segments side by side: plain host memory.

use std::any::Any;

use coxswain_proto::ids::Step;
use coxswain_task::{Batch, Sample};

/// Left and right.
pub const CHANNELS: usize = 2;

/// A segment of a track.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SegmentSample {
    /// Its number among all segments.
    pub index: u64,
    /// `[channels, l]`.
    pub mixture: Vec<f32>,
    /// `[stems, channels, l]`.
    pub stems: Vec<f32>,
}

/// Segments of one forward pass, all of one length.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SegmentBatch {
    /// The optimizer step that they belong to.
    pub step: Step,
    /// Their numbers.
    pub indices: Vec<u64>,
    /// `[b, channels, l]`.
    pub mixtures: Vec<f32>,
    /// `[b, stems, channels, l]`.
    pub stems: Vec<f32>,
    /// Frames of a segment's spectrum.
    pub frames: usize,
}

impl SegmentBatch {
    /// These segments, in this order.
    pub fn of(step: Step, frames: usize, samples: &[&SegmentSample]) -> Self {
        Self {
            step,
            indices: samples.iter().map(|sample| sample.index).collect(),
            mixtures: samples.iter().flat_map(|sample| &sample.mixture).copied().collect(),
            stems: samples.iter().flat_map(|sample| &sample.stems).copied().collect(),
            frames,
        }
    }

    /// What [`SegmentBatch::of`] was given.
    pub fn apart(&self) -> impl Iterator<Item = SegmentSample> {
        let rows = self.indices.len().max(1);
        let mixtures = self.mixtures.chunks(self.mixtures.len() / rows);
        let stems = self.stems.chunks(self.stems.len() / rows);
        self.indices.iter().zip(mixtures).zip(stems).map(|((&index, mixture), stems)| SegmentSample {
            index,
            mixture: mixture.to_vec(),
            stems: stems.to_vec(),
        })
    }
}

impl Sample for SegmentSample {
    fn index(&self) -> u64 {
        self.index
    }

    fn boxed(&self) -> Box<dyn Sample> {
        Box::new(self.clone())
    }

    fn equals(&self, other: &dyn Sample) -> bool {
        other.as_any().downcast_ref() == Some(self)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Batch for SegmentBatch {
    fn step(&self) -> Step {
        self.step
    }

    fn samples(&self) -> &[u64] {
        &self.indices
    }

    fn tokens(&self) -> u64 {
        self.cells() as u64
    }

    fn cells(&self) -> usize {
        self.indices.len() * self.frames
    }

    fn bytes(&self) -> u64 {
        4 * (self.mixtures.len() + self.stems.len()) as u64
    }

    fn equals(&self, other: &dyn Batch) -> bool {
        other.as_any().downcast_ref() == Some(self)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
