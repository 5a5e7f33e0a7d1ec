//! A run's samples: frames of a LeRobot data set, normalised, with images as patches and the task as token
//! ids.
//!
//! ```text
//! dataset     opened and checked for a run        reading      its samples, one by one
//! batch       a sample, a micro-batch             collate      the one from the other, and back
//! samples     what the engine sees of all this    keys         names of samples by content, for the feature
//!                                                              store
//! outline     sizes of samples, from metadata alone            sample_file  one sample, written out
//! opening     metadata, footers and tables, from a disk or a bucket
//! mixture     several data sets as one                         run_data     what of either is measured
//! policy_file what the trained policy takes and gives          constant     numbers that never change
//! kept        statistics that a run has computed               sizes        those of a sample
//! recipe      what is done to a sample besides: augmentation (random changes of images in training),
//!             deltas (actions as differences from the state)   preview      an episode, for people
//! ```
//!
//! Memory: metadata (40 bytes an episode) and a cache of fixed size. It grows with the size of the data set
//! only where features are kept: 33 bytes a frame of names (`keys`).

mod augmentation;
pub mod batch;
mod collate;
mod constant;
mod dataset;
mod deltas;
mod kept;
mod keys;
mod mixture;
mod numeric;
mod opening;
mod outline;
mod policy_file;
mod preview;
mod reading;
mod recipe;
mod run_data;
mod sample_file;
mod samples;
mod selection;
mod sizes;
#[cfg(test)]
mod tests;

pub use batch::{MicroBatch, Sample, SampleDims, widened};
pub use collate::{collate, take_apart};
pub use dataset::Dataset;
pub use deltas::DeltaActions;
pub use mixture::{Mixture, path_of};
pub use outline::{Outline, PromptLength};
pub use policy_file::{
    CameraInput, Chunk, FeaturePart, Flow, NumericFeature, PaddedSizes, PolicyFile, STATS_FILE,
};
pub use run_data::RunData;
pub use sample_file::write_sample;
