//! Images of folders, and micro-batches of their patches.
//!
//! ```text
//! folder   which images there are, in which order, which train; each as patches
//! batch    a sample, a micro-batch, and the one from the other
//! ```

mod batch;
mod folder;

pub use batch::{ImageBatch, ImageSample};
pub use folder::{ImageFolder, Listing, grid_of, list};
