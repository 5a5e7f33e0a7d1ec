//! Qwen2.5-VL (arXiv 2502.13923), read from a Hugging Face directory. `config.json` decides every size.
//!
//! ```text
//! family · outline     what tasks find
//! config · modules     config.json, checked; the names that PEFT knows
//! rules                what names mean
//! processor            prompts and chats to token ids
//! windows · rope       host integers and tables: window order, positions on three axes
//! vision · text · mlp · embed      the two towers
//! trunk                the vision tower's first blocks alone: what images are between them
//! model                all of it, read from its directory
//! run · pass · dropout a micro-batch through both towers and back
//! decode · following   prompts, and tokens after them one by one
//! forward · inputs     `cox model forward`: everything at once, for comparison with other implementations
//! ```
//!
//! Frozen tensors live on the plain backend. The blocks run on any tape: the trainer decides what is
//! recorded. Not here: which layers are recomputed.

pub mod config;
mod decode;
mod dropout;
mod embed;
mod family;
mod following;
pub mod forward;
pub mod inputs;
mod mlp;
pub mod model;
pub mod modules;
mod outline;
mod pass;
mod processor;
pub mod rope;
mod rules;
mod run;
#[cfg(test)]
mod synthetic_tests;
#[cfg(test)]
mod tests;
pub mod text;
mod trunk;
pub mod vision;
pub mod windows;

pub use self::family::Qwen2_5Vl;
