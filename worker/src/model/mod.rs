//! The policy and its parts.

pub mod block;
pub mod dense;
pub mod expert;
pub mod flops;
pub mod flow;
pub mod policy;
pub mod qwen;
pub mod recompute;
pub mod sensor;
