//! What of an objective may be kept: the part that is a pure function of the weights below a tap and of the
//! sample.

use std::{path::PathBuf, sync::Arc};

use coxswain_feature_store::Digest;
use coxswain_nn::{
    kernels::Tape,
    params::{Group, Trainables},
};

use crate::{Batch, CachedFeatures, TaskError};

/// How many tokens of a sample have features, by what is kept of its inputs: token ids, and shapes of images.
type Tokens = dyn Fn(&[u32], &[[u32; 3]]) -> usize + Send + Sync;

/// Which tokens of a sample have features, and how many values each.
#[derive(Clone)]
pub struct FeatureShape {
    /// Values of a token.
    pub width: usize,
    tokens: Arc<Tokens>,
}

impl FeatureShape {
    /// Features of `width` values for each of the tokens that `tokens` counts.
    pub fn new(width: usize, tokens: impl Fn(&[u32], &[[u32; 3]]) -> usize + Send + Sync + 'static) -> Self {
        Self { width, tokens: Arc::new(tokens) }
    }

    /// Features of every token of the prompt.
    pub fn every_token(width: usize) -> Self {
        Self::new(width, |ids, _| ids.len())
    }

    /// Values of all tokens of a sample that have features.
    pub fn values(&self, ids: &[u32], shapes: &[[u32; 3]]) -> usize {
        (self.tokens)(ids, shapes) * self.width
    }
}

/// Everything frozen that features depend on, not read yet.
pub trait FrozenWeights {
    /// The files that are read.
    fn files(&self) -> Vec<PathBuf>;

    /// Names what is read of the files: equal names and unchanged files have equal digests.
    fn name(&self) -> String;

    /// Reads the weights once more, at the speed of hashing.
    fn digest(&self) -> Result<Digest, TaskError>;
}

/// The part of an objective below its tap.
///
/// A feature's value must depend on its own sample alone, bit for bit: not on which samples share the batch,
/// nor on padding.
pub trait Extractor<B: Tape<Base = B>> {
    /// Where features are taken, in words.
    fn tap(&self) -> String;

    /// For the log: where features are taken, what is skipped, what trains when. One line each.
    fn describe(&self) -> Vec<String>;

    /// Which tokens have features.
    fn shape(&self) -> FeatureShape;

    /// The group of trainables below the tap, first in the layout, which rests in steps that use features of
    /// an older adapter.
    fn resting(&self) -> Group;

    /// Values that each row of a batch has at the tap.
    fn row_values(&self, batch: &dyn Batch) -> Vec<usize>;

    /// The features of a batch, with the trainables below the tap as in `trainables`, which need not hold
    /// anything else.
    fn compute(&self, trainables: &Trainables<B>, batch: &dyn Batch) -> Result<CachedFeatures, TaskError>;

    /// What features depend on besides the trainables and the sample.
    fn frozen(&self) -> Result<Box<dyn FrozenWeights>, TaskError>;
}
