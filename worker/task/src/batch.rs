//! Samples and batches as the engine passes them from threads to the device: opaque, but for what is written
//! here.

use std::{any::Any, fmt::Debug};

use coxswain_proto::ids::Step;

/// What is asked of tasks with an extractor alone, and asked of another one.
pub(crate) const KEEPS_NOTHING: &str = "features of a task without an extractor";

/// What of a sample's inputs is kept in the store beside its features, so that a hit reads and tokenizes
/// nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Inputs {
    /// Token ids.
    pub ids: Vec<u32>,
    /// How images lie in the model's input: three numbers for each, which only the model's family
    /// understands.
    pub shapes: Vec<[u32; 3]>,
}

/// A value that is passed on by those who do not know its type. Every plain value is one.
pub trait Opaque: Any + Debug + Send + Sync {
    /// Whether the other one is of the same type and has the same values.
    fn equals(&self, other: &dyn Any) -> bool;
}

impl<T: Any + Debug + Send + Sync + PartialEq> Opaque for T {
    fn equals(&self, other: &dyn Any) -> bool {
        other.downcast_ref() == Some(self)
    }
}

/// How a sample of unknown type is copied. Every sample that is `Clone` has it.
pub trait CopySample {
    /// A copy.
    fn boxed(&self) -> Box<dyn Sample>;
}

impl<S: Sample + Clone> CopySample for S {
    fn boxed(&self) -> Box<dyn Sample> {
        Box::new(self.clone())
    }
}

/// One sample, preprocessed. A task without an [`Extractor`](super::Extractor) leaves [`Sample::inputs`] and
/// [`Sample::take_seen`] as they are.
pub trait Sample: Opaque + CopySample {
    /// Place in the data set, which keys its random draws.
    fn index(&self) -> u64;

    /// What is kept of its inputs beside its features.
    fn inputs(&self) -> Inputs {
        Inputs::default()
    }

    /// Takes out what features are computed from: the sample that is returned has its inputs and nothing
    /// else, this one keeps all but the large ones.
    fn take_seen(&mut self) -> Box<dyn Sample> {
        self.boxed()
    }
}

impl dyn Sample {
    /// The task's own sample.
    pub fn content<S: Sample>(&self) -> &S {
        (self as &dyn Any).downcast_ref().expect("samples of a run are those of its task")
    }
}

impl Clone for Box<dyn Sample> {
    fn clone(&self) -> Self {
        self.boxed()
    }
}

impl PartialEq for dyn Sample {
    fn eq(&self, other: &Self) -> bool {
        self.equals(other)
    }
}

/// Features of the rows of a batch at an objective's tap.
///
/// A row has as many tokens as the [`FeatureShape`](super::FeatureShape) says of its inputs, padding has
/// none. Where a tap has several tensors, a row's are one after the other.
#[derive(Clone, Debug, PartialEq)]
pub struct CachedFeatures {
    /// Values of a token.
    pub width: usize,
    /// `[tokens, width]`, the rows' tokens one after the other.
    pub values: Vec<f32>,
}

/// The samples of one forward pass on one rank. A task without an [`Extractor`](super::Extractor) leaves what
/// is said of features as it is: its batches have none, and are never given any.
pub trait Batch: Opaque {
    /// The optimizer step it belongs to.
    fn step(&self) -> Step;

    /// The samples' indices, in the order of its rows.
    fn samples(&self) -> &[u64];

    /// Tokens (or whatever the task counts its speed in) that are not padding:
    /// all of its cells, unless the task says otherwise.
    fn tokens(&self) -> u64 {
        self.cells() as u64
    }

    /// Rows times padded length: what the memory of a pass grows with.
    fn cells(&self) -> usize;

    /// Bytes of its values, features included.
    fn bytes(&self) -> u64;

    /// Features to use instead of computing them; none where the pass computes its own.
    fn features(&self) -> Option<&CachedFeatures> {
        None
    }

    /// See [`Batch::features`].
    fn features_mut(&mut self) -> &mut Option<CachedFeatures> {
        unreachable!("{KEEPS_NOTHING}")
    }

    /// This batch with these features, without the inputs that they stand for.
    fn with_features(&self, _features: CachedFeatures) -> Box<dyn Batch> {
        unreachable!("{KEEPS_NOTHING}")
    }
}

impl dyn Batch {
    /// The task's own batch.
    pub fn content<T: Batch>(&self) -> &T {
        (self as &dyn Any).downcast_ref().expect("batches of a run are those of its task")
    }

    /// Rows.
    pub fn len(&self) -> usize {
        self.samples().len()
    }

    /// True when no sample is left for this rank.
    pub fn is_empty(&self) -> bool {
        self.samples().is_empty()
    }
}

impl PartialEq for dyn Batch {
    fn eq(&self, other: &Self) -> bool {
        self.equals(other)
    }
}
