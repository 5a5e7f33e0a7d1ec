//! Micro-batches made ahead of the training thread, with features from the store where it has them.
//!
//! ```text
//! prefetch   threads that read samples and put them together, in order, within a bound       recut, upcoming
//! rows       a micro-batch with features that were kept, and what is missing of them
//! ```
//!
//! Memory: the micro-batches of the prefetch bound. It does not grow with the number of batches or the size of the data set. Nothing here
//! knows what a sample is, tensors, ranks or gRPC.

mod prefetch;
mod rows;
#[cfg(test)]
mod tests;

pub use coxswain_data::DataError;
pub use prefetch::{Prefetcher, StepRequest, Upcoming};
pub use rows::{KeptFeatures, Missing, Prepared};
