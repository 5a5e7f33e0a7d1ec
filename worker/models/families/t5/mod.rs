//! T5 (arXiv 1910.10683), its version 1.1 and mT5 (arXiv 2010.11934), read from a Hugging Face directory.
//! `config.json` decides every size.
//!
//! ```text
//! family · outline     what tasks find
//! rules                what names mean
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
//! Not here: T5's own dropout (adapters have theirs); streamed blocks.

mod attention;
mod block;
mod buckets;
mod config;
mod context;
mod family;
mod feed_forward;
mod forward;
mod head;
mod inputs;
mod model;
mod modules;
mod outline;
mod pass;
mod rules;
mod spiece;
#[cfg(test)]
mod tests;
mod tokenizer;
mod writing;

pub use self::family::T5Family;
