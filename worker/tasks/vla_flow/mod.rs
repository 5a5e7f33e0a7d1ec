//! A vision-language-action policy: a pretrained vision-language model, a sensor encoder, and a head that
//! makes actions: an expert trained by flow matching, or an MLP.

pub mod adapters;
mod base;
pub mod config;
pub mod data;
mod examples;
pub mod expert;
pub mod flow;
mod groups;
pub mod head;
mod lerobot;
mod measures;
pub mod memory;
mod objective;
pub mod oft;
pub mod policy;
pub mod selftest;
pub mod sensor;
mod serving;
mod start;
mod starter;
mod task;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod told;

pub use groups::{EXPERT, SENSOR};
pub use task::VlaFlow;
