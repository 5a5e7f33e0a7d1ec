//! Qwen2.5-VL (arXiv 2502.13923), read from a Hugging Face directory. `config.json` decides every size.
//!
//! ```text
//! family · outline     what tasks find
//! config · modules     config.json, checked; the names that PEFT knows
//! rules                what names mean
//! windows              host integers: the order of patches, in attention windows
//! vision               the vision tower; everything around it is `two_towers`
//! ```

pub mod config;
mod family;
pub mod modules;
mod outline;
#[cfg(test)]
mod processor_tests;
mod rules;
#[cfg(test)]
mod synthetic_tests;
#[cfg(test)]
mod tests;
pub mod vision;
pub mod windows;

pub use self::{family::Qwen2_5Vl, vision::QwenVl};
