//! A trained policy in use: what a run has left, answering observations.
//!
//! ```text
//! described     what the policy takes and gives, by the files of a run
//! observation   named values, checked -> a sample as training saw them, and noise
//!   chunking      a chunk that goes on from the one before
//!   values        what numbers, pixels and text are, whatever their feature
//! responder     samples side by side -> hidden states, Euler steps -> actions in the data set's units
//! weights       adapter, expert and sensor encoder, from the files of a run
//! ```
//!
//! Everything comes from the run's directory and the pretrained model; the data set is not needed.

mod chunking;
mod described;
mod observation;
mod observed;
mod responder;
#[cfg(test)]
mod tests;
mod values;
mod weights;

pub use responder::PolicyResponder;
