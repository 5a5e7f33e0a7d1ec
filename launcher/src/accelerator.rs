//! What this build can do with cards.

use coxswain_worker::device::Accelerator;

/// NVIDIA's cards, or the null object in a build without them.
pub fn accelerator() -> &'static dyn Accelerator {
    #[cfg(feature = "cuda")]
    return &coxswain_cuda::Nvidia;
    #[cfg(not(feature = "cuda"))]
    return &coxswain_worker::device::Absent;
}
