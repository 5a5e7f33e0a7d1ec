//! Sequence to sequence: T5, T5 1.1 and mT5 on pairs of texts, the loss on targets, ROUGE of what the decoder
//! writes by itself.
//!
//! ```text
//! config      its keys in run files
//! data        pairs of texts from JSONL, CSV and TSV; their ids; micro-batches of them
//! model       loading, forward and backward, writing
//! rouge       how much of a reference an answer has
//! objective   what the engine trains: losses, measures, the adapter at the end
//! results     what a run leaves of the model
//! generation  `cox generate`
//! memory      what a rank will hold
//! starter     a run file for data that a user has: `cox init`
//! ```

pub mod config;
pub mod data;
mod generation;
pub mod memory;
mod model;
mod objective;
mod rouge;
mod starter;
mod task;
#[cfg(test)]
mod tests;

pub use task::Seq2Seq;
