//! Band-split dual-path separation of stereo audio: a mixture goes in, one signal for each stem comes out.
//! Everything trains, from random weights.
//!
//! ```text
//! config      its keys in run files
//! data        tracks on disk; segments of them; micro-batches of those
//! stft        spectra of signals, signals of spectra, the gradient between them
//! bands       which frequencies a band has
//! network     bands in, masks out; block: attention along time or along bands
//! scene       a micro-batch in host memory: spectra, estimates, loss and its gradient by masks
//! measures    ratios of signal to distortion
//! objective   what the engine trains, evaluates and exports
//! stems       whole mixtures taken apart into files
//! memory      what a rank will hold
//! starter     a run file for data that a user has: `cox init`
//! ```

mod bands;
mod block;
pub mod config;
pub mod data;
mod measures;
pub mod memory;
mod network;
mod objective;
mod scene;
mod starter;
mod stems;
mod stft;
mod task;
#[cfg(test)]
mod tests;

pub use task::Separation;
