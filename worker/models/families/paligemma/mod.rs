//! PaliGemma (arXiv 2407.07726), as policies find it: a SigLIP tower, one linear behind it, and the decoder
//! layers of a Gemma. `config.json` decides every size.
//!
//! Token embeddings are those of the table times the root of their width, as Gemma has them; features of
//! images are not scaled.
//!
//! ```text
//! config  config.json, checked
//! ```
//!
//! Not here: chats, the language model by its own masks, and its head, which no action depends on.

mod config;

use crate::joint::TowerDecoderFamily;

/// The family `paligemma`.
pub const PALIGEMMA: TowerDecoderFamily =
    TowerDecoderFamily { model_types: &["paligemma"], read: config::read };
