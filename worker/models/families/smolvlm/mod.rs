//! SmolVLM2 (arXiv 2504.05299), as policies find it: a SigLIP tower, pixel shuffle, a connector, and the
//! first decoder layers of a Llama. `config.json` decides every size.
//!
//! ```text
//! family    what policies find
//! config    config.json, checked; all tensors, known from sizes alone
//! vision    images to features
//! model     tower, connector, table and decoder layers
//! ```
//!
//! Not here: chats, and the language model by its own masks and positions.

mod config;
mod family;
mod model;
mod vision;

pub use self::family::SmolVlm;
