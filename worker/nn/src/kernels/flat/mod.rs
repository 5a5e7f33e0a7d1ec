//! Buffers of the flat parameter buffer: where they lie, and what is done to them.
//!
//! ```text
//! buffer    Flat: one float32 buffer, and the operations that gradients, optimizer and recovery need of it
//! host      in host memory: a Vec<f32>, on as many threads as there are
//! device    in a device's memory: a tensor of a backend, whose elements the host sees only when somebody
//!           asks for them
//! on_device what is done with it there
//! offloaded AdamW for moments that are in host memory between uses (`memory.offload: optimizer`)
//! tensors   what `on_device` does, in burn's own operations, for backends that have nothing better (GPUs
//!           have kernels: `kernels::cube`)
//! adamw     the optimizer's arithmetic, and its coefficients
//! largest   the largest magnitude (host)
//! rows      gradients of a table whose rows are looked up
//! squares   the sum of squares (host)
//! ```
//!
//! Which of the two a run uses is its backend's to say ([`FlatOps::Flat`](super::FlatOps::Flat)):
//! the flat parameter buffer lies where the tensors of the model lie, so gradients are summed where they are
//! made and values change where they are read. On a device a step moves the partial sums of the gradient's
//! norm to the host (a float for 4096 trainables) and nothing else; what is rare reads and writes whole
//! buffers: checkpoints, recovery, the watch over the first gradients, a gradient that is not finite.
//!
//! What this module does not do: know parameters (`params`), ranks (`zero`), or how buffers travel
//! (`collective`).

pub mod adamw;
mod buffer;
mod device;
mod host;
mod largest;
mod offloaded;
mod on_device;
mod rows;
mod squares;
pub mod tensors;
#[cfg(test)]
mod tests;

pub use self::{
    adamw::{Average, Coefficients, Part, Run},
    buffer::{DeviceBuffer, DeviceElement, Flat, FlatOn, Gradient, Halves, HostCopy, LentBuffer, Product},
    device::{HalvesOnDevice, OnDevice, SLACK},
    largest::largest,
    on_device::WAITING,
    rows::{Lookups, RowGradients},
};
