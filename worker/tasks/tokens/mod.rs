//! What `sft` and `seq2seq` have in common: samples are records of a text file, and the loss is that of
//! predicting tokens.
//!
//! ```text
//! lines     records of a text file, read where they lie
//! outline   which of them tell how long all are, without reading every one
//! sums      what predicting the tokens of a batch has come to
//! memory    what a rank holds beside its passes
//! ```

pub mod lines;
pub mod memory;
pub mod outline;
pub mod sums;
