//! Data sets as they lie on disk, and the order in which training goes through them.
//!
//! ```text
//! lerobot     metadata, rows and frames of videos (v3.0, v2.1, v2.0)
//! normalize   numbers to model range and back
//! order       position to sample
//! mixture     how much of each of several data sets an epoch takes
//! inspect     a data set, described
//! place       files of data sets, on disks and in buckets
//! pictures    PNG and JPEG to pixels
//! orientation which way up a picture is
//! preview     an episode, for people
//! shards      WebDataset shards: tar files of samples, read where they lie
//! surviving   decoders that panic, as errors
//! text        files of text, whole
//! yaml        text that becomes a part of a run file
//! ```
//!
//! Nothing here knows tensors, models, ranks or gRPC, nor what a sample is to a task.

pub mod error;
mod inspect;
pub mod lerobot;
mod mixture;
mod normalize;
mod order;
pub mod orientation;
pub mod pictures;
pub mod pixels;
pub mod place;
pub mod preview;
pub mod shards;
pub mod surviving;
pub mod text;
pub mod yaml;

pub use coxswain_video::{ASSEMBLY as VIDEO_ASSEMBLY, Counts as Decoding};
pub use error::DataError;
pub use inspect::{FeatureReport, Report, Role, inspect};
pub use lerobot::Fingerprint;
pub use mixture::{WeightedDataset, taken};
pub use normalize::{FarValue, NormMode, Normalizer};
pub use order::{SampleOrder, TrainingSamples};
