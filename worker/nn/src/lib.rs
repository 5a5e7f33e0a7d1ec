//! What models are made of, and what the engine and the models share.
//!
//! ```text
//! lora recompute dense      adapters, layers that run again in the backward pass, a linear layer
//! next_token                the loss of a language model, in chunks
//! files tensor_file         weights in files
//! rules                     how trainables follow their gradients: optimizers
//! params                    trainables in one flat buffer
//! sharded                   frozen weights of which each rank holds a part
//! kernels                   fused operations on burn tensors with their backward passes; buffers of the flat
//!                           parameter buffer
//! profile                   where the time and memory of steps go
//! memory pulse bfloat16     counted allocations and out of memory as a value; signs of motion; rounding
//! dtypes                    the precisions that a run file chooses from
//! ```
//!
//! Imports only go down this list. This crate knows no model, no file format of a data set, no rank and no
//! engine. Draws (`rng`) are the protocol's, which the coordinator counts with, too.
//!
//! Tensor names carry their axes as a suffix: `b` batch, `s` sequence, `n` tokens (`b * s`), `d` hidden, `h`
//! heads, `k` head dimension, `r` LoRA rank, `o`/`i` output/input features, `p` patches, `c` channels, `t`
//! action steps.

pub mod bfloat16;
pub mod block;
pub mod dense;
pub mod dtypes;
pub mod files;
pub mod kernels;
pub mod lora;
pub mod memory;
pub mod next_token;
pub mod params;
pub mod profile;
pub mod pulse;
pub mod recompute;
pub mod rules;
pub mod sharded;
pub mod tensor_file;

pub use coxswain_proto::rng;
