//! Micro-batches made ahead of the training thread, with features from the store where it has them.
//!
//! ```text
//! prefetch   the pipeline, as the trainer drives it: samples read and put together, in order, within a bound
//! queue      what the trainer and the data threads share, and what the threads do
//! recut      micro-batches that are ready, cut anew after one did not fit
//! upcoming   rows of micro-batches that wait, completed before their turn
//! rows       a micro-batch with features that were kept, and what is missing of them
//! note       which samples are being read, for the launcher of a process that a sample ends
//! poison     a sample that ends its process on purpose, for tests
//! ```
//!
//! Memory: the micro-batches of the prefetch bound, those that are being made included. Where a task's
//! `collate` copies its samples, one that is being put together is there twice for that moment. It does not
//! grow with the number of batches or the size of the data set. Nothing here knows what a sample is, tensors,
//! ranks or gRPC.

pub mod note;
mod poison;
mod prefetch;
mod queue;
mod recut;
mod rows;
#[cfg(test)]
mod tests;
mod upcoming;

pub use coxswain_data::DataError;
pub use prefetch::Prefetcher;
pub use queue::StepRequest;
pub use rows::{KeptFeatures, RowBatch, UncachedRow};
pub use upcoming::DeferredRow;
