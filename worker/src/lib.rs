//! One worker: one process, one device, one rank.
//!
//! Imports only go down this list:
//!
//! ```text
//! session            gRPC and the worker's state machine; never sees a tensor
//!   link trainer     the two channels between session and trainer, as a trait; `Solo` is its null object
//! selftest device    what a node can do; what to compute on
//! train              the trainer thread: loop, step transaction, checkpoint, export; never sees tonic
//! zero model lora data memory collective
//! vl_cache           features of frozen extractors, kept by content; knows files and bytes
//! params kernels     trainables in one flat space; fused operations on burn tensors
//! batch pulse        plain data; signs that the trainer moves. Draws (`rng`) are the protocol's, which the coordinator counts with, too
//! ```
//!
//! Tensor names carry their axes as a suffix: `b` batch, `s` sequence, `n` tokens (`b * s`), `d` hidden, `h` heads, `k` head
//! dimension, `r` LoRA rank, `o`/`i` output/input features, `p` patches, `c` channels, `t` action steps.

pub mod batch;
mod bfloat16;
pub mod collective;
pub mod data;
pub mod device;
pub mod kernels;
pub mod link;
pub mod lora;
pub mod memory;
pub mod model;
pub mod params;
pub mod pulse;
pub mod selftest;
pub mod session;
pub mod train;
pub mod trainer;
pub mod vl_cache;
pub mod zero;

pub use coxswain_proto::rng;
