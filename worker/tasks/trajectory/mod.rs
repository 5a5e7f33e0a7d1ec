//! Streaming training on trajectories of layer activations: images through a frozen vision tower, the hidden
//! states of chosen layers pooled to a few positions, and a small network that learns to reconstruct them,
//! batch by batch. With LoRA the network of an earlier run is adapted to other images.
//!
//! ```text
//! config      its keys in run files
//! data        folders of images, which of them train; micro-batches of their patches
//! extractor   images to trajectories: the frozen part, whose results may be kept
//! network     autoencoder, variational autoencoder, transformer
//! model       both: forward, backward, losses
//! objective   what the engine trains: measures, what is exported
//! memory      what a rank will hold
//! starter     a run file for data that a user has: `cox init`
//! ```

pub mod config;
pub mod data;
mod extractor;
pub mod memory;
pub mod model;
pub mod network;
mod objective;
mod starter;
mod task;
#[cfg(test)]
mod tests;

pub use task::Trajectory;
