//! A vision-language-action policy: Qwen2.5-VL, a sensor encoder, and an action expert trained by flow
//! matching.

pub mod adapters;
mod base;
pub mod config;
pub mod data;
mod examples;
pub mod expert;
pub mod flow;
mod groups;
mod lerobot;
mod measures;
pub mod memory;
mod objective;
pub mod policy;
pub mod selftest;
pub mod sensor;
mod serving;
mod start;
mod starter;
mod task;
#[cfg(any(test, feature = "testing"))]
pub mod testing;

pub use groups::{EXPERT, SENSOR};
pub use task::VlaFlow;
