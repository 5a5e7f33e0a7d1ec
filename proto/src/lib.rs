//! What coordinator, workers and launcher agree on: the wire contract `coxswain.v1`, id newtypes, the checked
//! [`RunSpec`](run_spec::RunSpec), and every limit. This crate knows nothing of the others.

#![forbid(unsafe_code)]

pub mod bounded;
pub mod cache_plan;
pub mod calls;
pub mod checkpoint;
mod codec;
pub mod config;
pub mod directory;
pub mod document;
pub mod first;
pub mod human;
pub mod identity;
pub mod ids;
pub mod in_place;
pub mod limits;
pub mod memory;
pub mod order;
pub mod plan;
pub mod replicas;
pub mod report;
pub mod rng;
pub mod run_spec;
#[cfg(test)]
mod toy;
pub mod v1;
pub mod witness;

/// The version that coordinator, launcher and workers of one run must share.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");
