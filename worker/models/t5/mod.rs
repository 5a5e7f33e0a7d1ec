//! T5 (arXiv 1910.10683), its version 1.1 and mT5 (arXiv 2010.11934), read from a Hugging Face directory.
//! `config.json` decides every size.
//!
//! ```text
//! config               config.json, checked
//! buckets              relative positions as buckets, and what attention adds to scores for them
//! attention · feed_forward · context · block     one block of the encoder, one of the decoder
//! modules              the names that PEFT knows
//! model                all of it, read from its directory
//! pass                 texts through encoder and decoder, and back
//! head                 the loss of what the decoder is to write
//! writing              what the decoder writes by itself
//! forward · inputs     `cox model forward`, for comparison with other implementations
//! tokenizer · spiece   text to ids: tokenizer.json, or SentencePiece's own file
//! ```
//!
//! Files, loading and streaming of weights are those of every checkpoint ([`qwen2_5_vl`](super::qwen2_5_vl)).
//! Not here: T5's own dropout (adapters have theirs); streamed blocks.

mod attention;
mod block;
mod buckets;
pub mod config;
pub mod context;
mod feed_forward;
pub mod forward;
mod head;
mod inputs;
mod model;
pub mod modules;
pub mod pass;
mod spiece;
#[cfg(test)]
mod tests;
pub mod tokenizer;
pub mod writing;

pub use self::{config::T5Config, model::T5};
