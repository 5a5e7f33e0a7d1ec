//! Streams of the vision tower, which are added to hidden states behind the first decoder layers: stream `j`
//! behind layer `j`.

use std::vec;

use burn::tensor::Tensor;
use coxswain_nn::kernels::Tape;

use super::images::ImageFeatures;

/// What is at a tap.
#[derive(Clone)]
pub struct AtTap<B: Tape<Base = B>> {
    /// Hidden states, `[n, d]`; at the vision tower's end image features, `[m, d]`.
    pub values: Tensor<B, 2>,
    /// Streams that are added above it, `[m, d]` each, in order.
    pub streams_md: Vec<Tensor<B, 2>>,
}

impl<B: Tape<Base = B>> From<ImageFeatures<B>> for AtTap<B> {
    fn from(ImageFeatures { features_md, streams_md }: ImageFeatures<B>) -> Self {
        Self { values: features_md, streams_md }
    }
}

/// The streams that are still to be added.
pub struct Streams<B: Tape<Base = B>> {
    /// The number of the first of them.
    first: usize,
    values_md: vec::IntoIter<Tensor<B, 2>>,
}

impl<B: Tape<Base = B>> Streams<B> {
    /// These, the first of which has this number.
    pub fn new(first: usize, values_md: Vec<Tensor<B, 2>>) -> Self {
        Self { first, values_md: values_md.into_iter() }
    }

    /// The next stream and its number, if it is added behind a layer before `end`.
    pub fn next(&mut self, end: usize) -> Option<(usize, Tensor<B, 2>)> {
        let values_md = if self.first < end { self.values_md.next() } else { None }?;
        self.first += 1;
        Some((self.first - 1, values_md))
    }

    /// The streams that were not taken.
    pub fn left(self) -> Vec<Tensor<B, 2>> {
        self.values_md.collect()
    }
}
