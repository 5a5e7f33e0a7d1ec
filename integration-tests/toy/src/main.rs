//! The program `cox-toy`: everything that `cox` does, with one more task.

use std::process::ExitCode;

use coxswain_worker::memory::CountingAllocator;
use mimalloc::MiMalloc;

/// Counts, so that a worker can say how much memory each phase took.
#[global_allocator]
static ALLOCATOR: CountingAllocator<MiMalloc> = CountingAllocator(MiMalloc);

fn main() -> ExitCode {
    coxswain::run(coxswain_toy::tasks())
}
