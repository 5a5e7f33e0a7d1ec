//! What this build can do with cards.

#[cfg(not(feature = "cuda"))]
use coxswain_worker::device::Absent;
use coxswain_worker::device::Accelerator;

/// NVIDIA's cards, or the null object in a build without them.
pub fn accelerator() -> &'static dyn Accelerator {
    #[cfg(feature = "cuda")]
    return &coxswain_cuda::Nvidia;
    #[cfg(not(feature = "cuda"))]
    return &Absent { driver: has_driver };
}

/// Whether the driver could be loaded here: then this is the wrong build for the machine, and choosing a device says so.
#[cfg(not(feature = "cuda"))]
fn has_driver() -> bool {
    // SAFETY: opening the driver runs its initialisers, as every program that uses a card does; no symbol is called.
    unsafe { libloading::Library::new("libcuda.so.1") }.is_ok()
}
