//! Images of folders or shards, and micro-batches of their patches.
//!
//! ```text
//! listing  which images there are, and in which order
//! folder   which of them train; each as patches
//! batch    a sample, a micro-batch, and the one from the other
//! ```

mod batch;
mod folder;
mod listing;

pub use batch::{ImageBatch, ImageSample};
pub use folder::{ImageFolder, grid_of};
pub use listing::{ENDINGS, Listing, list};
