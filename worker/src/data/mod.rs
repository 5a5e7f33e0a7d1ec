//! LeRobot data sets, from files to micro-batches.
//!
//! ```text
//! lerobot    metadata and rows as they lie on disk (v3.0, v2.1)
//! normalize  numbers to model range and back          preprocessor, image, resize, vision  images to patches
//! prompt     task text to token ids                   order           position to sample
//! dataset    all of it, opened and checked for a run   reading         its samples, one by one
//! collate, prefetch   samples to micro-batches, ahead of the trainer
//! rows       a micro-batch with features that were kept, and what is missing of them
//! inspect    a data set, described                    sample_file     one sample, written out
//! outline    sizes of its samples, from metadata alone     keys            names of samples by content, for the feature store
//! ```
//!
//! Memory: metadata (40 bytes an episode), a cache of fixed size, and the micro-batches of the prefetch bound. It does not grow with the
//! number of batches, and with the size of the data set only where features are kept: 33 bytes a frame of names (`keys`). Nothing here
//! knows tensors, ranks or gRPC.

mod collate;
mod dataset;
mod error;
mod image;
mod inspect;
mod keys;
pub mod lerobot;
mod normalize;
mod order;
mod outline;
mod prefetch;
mod preprocessor;
mod prompt;
mod reading;
mod resize;
mod rows;
mod sample_file;
mod vision;

pub use collate::collate;
pub use dataset::Dataset;
pub use error::DataError;
pub use inspect::{FeatureReport, Report, Role, inspect};
pub use keys::SampleKeys;
pub use lerobot::Fingerprint;
pub use normalize::Normalizer;
pub use order::{SampleOrder, TrainingSamples};
pub use outline::{Outline, PromptLength};
pub use prefetch::{Prefetcher, StepRequest, Upcoming};
pub use prompt::{ModelFacts, PromptEncoder};
pub use reading::Readable;
pub use rows::{FeatureShape, KeptFeatures, Missing, Prepared};
pub use sample_file::write_sample;
pub use vision::{DEFAULT_MAX_PIXELS, ImageProcessor, PatchShape, Patches, smart_resize};

#[cfg(test)]
pub(crate) mod tests;
