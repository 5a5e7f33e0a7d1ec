//! PaliGemma (arXiv 2407.07726), as policies find it: a SigLIP tower, one linear behind it, and the decoder
//! layers of a Gemma. `config.json` decides every size.
//!
//! ```text
//! family    what policies find
//! config    config.json, checked; all tensors, known from sizes alone
//! vision    images to features
//! model     tower, projector, table and decoder layers
//! ```
//!
//! Token embeddings are those of the table times the root of their width, as Gemma has them; features of
//! images are not scaled.
//!
//! Not here: chats, the language model by its own masks, and its head, which no action depends on.

mod config;
mod family;
mod model;
mod vision;

pub use self::family::PaliGemma;
