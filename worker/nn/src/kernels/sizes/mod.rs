//! A backend that knows sizes and drops, and no values: a task's own pass runs on it, and its account tells
//! what the pass holds at its worst moment, and how much it multiplies and adds.
//!
//! Tensors are handles that are given back when their last owner drops them, as the real ones are. So the
//! order of drops, what autodiff keeps, and what recompute keeps come from the code that trains; nothing
//! about a model is written twice. What is written here, once for each operation and not for each model, is
//! how a backend places results: which are views, which are written in place, what a fused operation needs
//! meanwhile. An account is of a CPU's memory or of a GPU's, where joined layers, their types and tiles of
//! attention are those of `kernels::cube`.
//!
//! ```text
//! ledger      buffers, who shares them, how many bytes are in use
//! router      burn-router's client and channel: every operation and every drop is told to a ledger
//! fused       one fused operation: what it reads, makes, and needs meanwhile
//! operations  those of [`ModelBackend`](super::ModelBackend), by size; linear layers in `linear`
//! on_gpu      those that a GPU does otherwise
//! pages       what a GPU's allocator reserves for what was taken and given back
//! products    the arithmetic of an operation
//! account     a ledger of one's own, for as long as something is run
//! ```
//!
//! What it does not see: host memory that is no tensor (noise, targets, the loss's gradient). Values that
//! are read back are zeros.

mod account;
mod fused;
mod ledger;
mod linear;
mod on_gpu;
mod operations;
pub mod pages;
mod products;
mod router;

pub use self::{
    account::Account,
    router::{Channel, Sizes, SizesDevice},
};
