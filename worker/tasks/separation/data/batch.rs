//! A segment as training sees it, and segments side by side: plain host memory.
//!
//! A batch shares the signals of the samples that it is made of: putting one together takes no memory, so
//! what is read ahead is never there twice.

use std::sync::Arc;

use coxswain_proto::ids::Step;
use coxswain_task::{Batch, Sample};

/// Left and right.
pub const CHANNELS: usize = 2;

/// A segment of a track.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SegmentSample {
    /// Number among all segments.
    pub index: u64,
    /// `[channels, l]`.
    pub mixture: Arc<Vec<f32>>,
    /// `[stems, channels, l]`.
    pub stems: Arc<Vec<f32>>,
}

/// Segments of one forward pass, all of one length.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SegmentBatch {
    /// The optimizer step that they belong to.
    pub step: Step,
    /// Numbers.
    pub indices: Vec<u64>,
    /// What they sound like.
    pub segments: Vec<SegmentSample>,
    /// Frames of a segment's spectrum.
    pub frames: usize,
}

impl SegmentBatch {
    /// These segments, in this order.
    pub fn from_samples(step: Step, frames: usize, samples: &[&SegmentSample]) -> Self {
        Self {
            step,
            indices: samples.iter().map(|sample| sample.index).collect(),
            segments: samples.iter().map(|sample| (*sample).clone()).collect(),
            frames,
        }
    }

    /// Signals of `l` samples: `[b, channels]` mixtures.
    pub fn mixtures(&self, l: usize) -> Vec<&[f32]> {
        self.segments.iter().flat_map(|segment| segment.mixture.chunks_exact(l)).collect()
    }

    /// Signals of `l` samples: `[b, stems, channels]`.
    pub fn stems(&self, l: usize) -> Vec<&[f32]> {
        self.segments.iter().flat_map(|segment| segment.stems.chunks_exact(l)).collect()
    }
}

impl Sample for SegmentSample {
    fn index(&self) -> u64 {
        self.index
    }
}

impl Batch for SegmentBatch {
    fn step(&self) -> Step {
        self.step
    }

    fn samples(&self) -> &[u64] {
        &self.indices
    }

    fn cells(&self) -> usize {
        self.indices.len() * self.frames
    }

    fn bytes(&self) -> u64 {
        let values = |segment: &SegmentSample| segment.mixture.len() + segment.stems.len();
        4 * self.segments.iter().map(values).sum::<usize>() as u64
    }
}
