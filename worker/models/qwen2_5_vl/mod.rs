//! Qwen2.5-VL (arXiv 2502.13923), read from a Hugging Face directory. `config.json` decides every size.
//!
//! ```text
//! config · fields      config.json, checked
//! checkpoint · mapping · reading · loader    safetensors to layers
//! blocks · stack       the repeated blocks of a tower: held, read when they run, or shared out over ranks
//! windows · rope       host integers and tables: window order, positions on three axes
//! vision · text · mlp · embed      the two towers
//! trunk                the vision tower's first blocks alone: what images are between them
//! modules              the names that PEFT knows
//! random · tokens      a checkpoint of these shapes with random weights
//! model                all of it, read from its directory
//! pass                 a micro-batch through both towers and back
//! decode · following   prompts, and tokens after them one by one
//! forward · inputs     `cox model forward`: everything at once, for comparison with other implementations
//! ```
//!
//! Frozen tensors live on the plain backend. The blocks run on any tape: the trainer decides what is
//! recorded. Not here: the preprocessing of images (`data`), which layers are recomputed (`train`).

pub mod adapters;
pub mod blocks;
pub mod checkpoint;
pub mod config;
pub mod decode;
pub mod dropout;
pub mod embed;
pub mod error;
pub(crate) mod fields;
pub mod following;
pub mod forward;
pub mod inputs;
pub(crate) mod loader;
mod mapping;
pub mod merge;
mod mlp;
mod model;
pub mod modules;
pub mod pass;
pub mod processor;
pub mod prompts;
mod reading;
pub mod rope;
pub mod settings;
pub mod stack;
pub mod synthetic;
#[cfg(test)]
mod tests;
pub mod text;
mod tokens;
mod trains;
mod trunk;
pub mod vision;
pub mod windows;

pub use self::{
    embed::ImageRows,
    error::ModelError,
    model::{LoadOptions, QwenVl},
    text::{DecoderLayer, TextContext, TextModel},
    trains::Trains,
    trunk::VisionTrunk,
    vision::{VisionBlock, VisionContext, VisionTower},
};
