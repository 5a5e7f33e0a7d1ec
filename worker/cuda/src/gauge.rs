//! What a GPU holds, read from cubecl's allocator and from the driver.

use std::sync::Arc;

use burn_cuda::CudaDevice;
use coxswain_nn::kernels::watermark;
use coxswain_worker::memory::{Gauge, PhasePeak};
use cubecl::{Runtime, cuda::CudaRuntime};
use cudarc::driver::{CudaContext, result};

/// Reads one GPU.
#[derive(Debug)]
pub struct GpuGauge {
    device: CudaDevice,
    /// The GPU's primary context, which burn uses as well; none if the driver refused it.
    context: Option<Arc<CudaContext>>,
}

impl GpuGauge {
    /// A gauge of the GPU of this number among those that the process sees.
    pub fn new(gpu: usize) -> Self {
        let context = CudaContext::new(gpu)
            .inspect_err(|error| tracing::warn!(gpu, %error, "cannot read the GPU's memory usage"));
        Self { device: CudaDevice::new(gpu), context: context.ok() }
    }

    /// Free bytes of the GPU, and all of them, as the driver says.
    fn free_and_total(&self) -> Option<(u64, u64)> {
        self.context.as_ref()?.bind_to_thread().ok()?;
        let (free, total) = result::mem_get_info().ok()?;
        Some((free as u64, total as u64))
    }

    /// In use and reserved by cubecl's allocator.
    fn allocator(&self) -> (u64, u64) {
        let usage = CudaRuntime::client(&self.device).memory_usage();
        usage.map_or((0, 0), |usage| (usage.bytes_in_use, usage.bytes_reserved))
    }
}

impl Gauge for GpuGauge {
    fn read(&self) -> PhasePeak {
        let (in_use, reserved) = self.allocator();
        let taken = self.free_and_total().map_or(0, |(free, total)| total.saturating_sub(free));
        PhasePeak { in_use, reserved, driver: taken }
    }

    fn watch(&self, on: bool) {
        watermark::watch(on);
    }

    fn take_most(&self) -> u64 {
        watermark::take()
    }

    fn room(&self) -> Option<u64> {
        let (free, _) = self.free_and_total()?;
        let (in_use, reserved) = self.allocator();
        Some(free + reserved.saturating_sub(in_use))
    }

    fn release(&self) {
        CudaRuntime::client(&self.device).memory_cleanup();
    }

    fn gpu(&self) -> Option<String> {
        self.context.as_ref()?.name().ok()
    }
}
