//! What a worker computes on, chosen at run time: the CPU, or one NVIDIA GPU.
//!
//! ```text
//! accelerator   what a build with GPUs can do with them; `NoAccelerator` is its null object
//! choose        `launch.device` and the local rank to a device
//! tasks         what this program can train, and on what
//! computing     the thread that computes, told what the run says of it
//! chosen        a trainer that knows its device when it has read the run
//! ```
//!
//! One process computes on one device. `CUDA_VISIBLE_DEVICES` is the driver's business: it shows this process
//! the GPUs it may use, numbered from 0, and the local rank picks one of them.
//!
//! What this module does not do: instantiate anything for a GPU. All of burn's CUDA backend is generic, and
//! costs minutes to build wherever it is named; only the crate that implements [`Accelerator`] does.

mod accelerator;
mod choose;
mod chosen;
pub(crate) mod computing;
mod tasks;
#[cfg(test)]
mod tests;

pub use self::{
    accelerator::{Accelerator, Gpus, NoAccelerator, NoGpus, OnGpu, Version},
    choose::choose,
    chosen::{ChosenTrainer, refusal},
    tasks::Tasks,
};
pub use crate::trainer::Device;
pub(crate) use tasks::measure;
