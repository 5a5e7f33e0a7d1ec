//! Qwen3-VL (arXiv 2511.21631), read from a Hugging Face directory. `config.json` decides every size.
//!
//! ```text
//! family · outline     what tasks find
//! config · modules     config.json, checked; the names that PEFT knows
//! rules                what names mean
//! positions            host integers and weights: learned positions, resampled to an image's grid
//! vision · merger      the vision tower with its streams (DeepStack); everything around it is `two_towers`
//! ```
//!
//! Not here: videos, which this family writes as timestamps and frames; mixtures of experts.

pub mod config;
mod family;
mod merger;
pub mod modules;
mod outline;
mod positions;
#[cfg(test)]
mod reading_tests;
mod rules;
#[cfg(test)]
mod synthetic_tests;
#[cfg(test)]
mod tests;
pub mod vision;

pub use self::{family::Qwen3Vl, vision::Qwen3VlModel};
