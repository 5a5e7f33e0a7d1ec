//! A run that needs no lasting disk: its checkpoints, journal and results are kept in a bucket, too
//! (`run.bucket`), and a launch on a machine with an empty disk goes on from there.
//!
//! ```text
//! launch    look ─▶ bring ─▶ take ─▶ coordinator, workers       they know of their disk only
//! training  uploader: checkpoint complete on the disk ─▶ its files ─▶ index
//! end       the last checkpoint, the results ─▶ index
//! ```
//!
//! The launcher with the coordinator does it, in a thread of its own. What it does not do: gather parts of a
//! checkpoint from several machines; those of a run have one output directory between them, as long as they
//! live.

mod bring;
mod error;
mod index;
mod local;
mod owner;
mod place;
mod uploader;

pub use self::{
    error::BucketError,
    local::Record,
    owner::Owner,
    place::{BucketPlace, address, take},
    uploader::{UploadJob, Uploader},
};

#[cfg(test)]
mod tests;
