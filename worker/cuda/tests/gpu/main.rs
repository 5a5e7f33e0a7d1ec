//! What only a machine with a GPU can show; what it takes to show it runs on the CPU as well, in every test
//! run.
//!
//! ```text
//! first      what a GPU is asked first: one kernel, one product
//! golden     the fixtures through the accelerator, in float32 and bfloat16
//! curve      fifty steps of training, a GPU beside the CPU
//! memory     what a GPU held, beside what was planned
//! offloaded  what a GPU does not hold
//! products   matrix products: cubek's kernel by kernel, and the library's
//! worlds     ranks in processes of their own: the collectives' suite, and a rank that is killed
//! rank       one of these processes
//! ```
//!
//! Without a GPU a test says on stderr what is missing, and passes. On a machine with one, nothing else is to
//! be set up (`docs/gpu.md`).

mod curve;
mod first;
mod golden;
mod memory;
mod offloaded;
mod products;
mod rank;
mod worlds;

use std::io::Write;

use coxswain_cuda::NVIDIA;
use coxswain_worker::device::{Accelerator, Tasks};

/// As `cox` has them.
fn tasks() -> Tasks {
    Tasks { cpu: coxswain_tasks::on_cpu().leak(), accelerator: &NVIDIA }
}

/// GPUs of this machine. Without one, says why on stderr, past the capture of a passing test's output.
fn gpus(test: &str) -> Option<usize> {
    skipped_unless(test, NVIDIA.probe().map(|gpus| gpus.count).map_err(|missing| missing.to_string()))
}

/// The GPUs of this machine, where NCCL is there as well.
fn gpus_with_nccl(test: &str) -> Option<usize> {
    let count = gpus(test)?;
    skipped_unless(test, NVIDIA.nccl().map(|_| count).map_err(|missing| missing.to_string()))
}

fn skipped_unless<T>(test: &str, found: Result<T, String>) -> Option<T> {
    // A stderr that is closed loses a line, and nothing else.
    let say = |missing: &String| drop(writeln!(std::io::stderr(), "skipped: {test}: {missing}"));
    found.inspect_err(say).ok()
}
