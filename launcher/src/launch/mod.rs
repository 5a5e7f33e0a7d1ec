//! From flags, environment and configuration to a launch plan: what `torchrun` calls its launch
//! configuration.
//!
//! ```text
//! flags ─┐
//! PET_*  ├─ resolve ──▶ Plan ──▶ worker environment
//! Slurm  │                └────▶ rendezvous: host the coordinator or join one
//! spec  ─┘   (the first that says something wins, in this order)
//! ```

pub mod data_place;
pub mod flags;
pub mod inputs;
pub mod machine;
mod names;
pub mod plan;
pub mod rdzv_conf;
pub mod rendezvous;
pub mod slurm;
pub mod streams;
pub mod worker_env;
pub mod world;
