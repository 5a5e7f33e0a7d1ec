//! Checkpoints on disk: what is there, whether it is whole, and how a new one appears.
//!
//! ```text
//! checkpoints/.tmp-step-00000040/   being written by all ranks; other `.tmp-` directories are on their way
//!                                   out
//! checkpoints/step-00000040/        complete: published by one rename, after every file is on disk and
//!                                   hashed
//!     manifest.json                 what it is, and the size and BLAKE3 of every file
//!     trainables.safetensors        all trainables, by name, fp32
//!     optimizer-rank0000-of-0002.safetensors   one rank's shard of the optimizer's state, by name and offset
//! ```
//!
//! Only what cannot be had elsewhere is stored: trainables, optimizer shards, position. Frozen weights never
//! are. All ranks need to see the same directory. A directory without a readable manifest does not count; one
//! without any manifest is what a crash left, and the next save removes it.

mod error;
mod found;
mod manifest;
mod proof;
mod remove;
mod staging;
mod store;

use coxswain_nn::params::TrainableLayout;

pub use error::CheckpointError;
pub(in crate::train) use error::{io_error, remedy};
pub use found::Checkpoint;
pub use manifest::{FileEntry, Manifest};
pub use staging::Staging;
pub(in crate::train) use staging::take_place;
pub use store::{DAMAGED, Store};

/// Everything that trains, in a checkpoint.
pub(in crate::train) const TRAINABLES: &str = "trainables.safetensors";
/// The run's specification, beside the directory of its checkpoints.
pub const SPEC_FILE: &str = "run_spec.json";

/// Bytes of a checkpoint: fp32 values of everything that trains and of constants, and so many of the
/// optimizer's state.
pub fn bytes(layout: &TrainableLayout, state: u64) -> u64 {
    4 * layout.whole_len() as u64 + state
}
