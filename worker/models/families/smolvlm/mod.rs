//! SmolVLM2 (arXiv 2504.05299), as policies find it: a SigLIP tower, pixel shuffle, a connector, and the
//! first decoder layers of a Llama. `config.json` decides every size.
//!
//! ```text
//! config  config.json, checked
//! ```
//!
//! Not here: chats, and the language model by its own masks and positions.

mod config;

use crate::joint::TowerDecoderFamily;

/// The family `smolvlm`.
pub const SMOLVLM: TowerDecoderFamily = TowerDecoderFamily { model_types: &["smolvlm"], read: config::read };
