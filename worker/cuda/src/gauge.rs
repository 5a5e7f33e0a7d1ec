//! What a GPU holds, read from cubecl's allocator and from the driver.

use std::sync::Arc;

use burn_cuda::CudaDevice;
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
    /// Of the GPU of this number among those that the process sees.
    pub fn new(gpu: usize) -> Self {
        let context = CudaContext::new(gpu)
            .inspect_err(|error| tracing::warn!(gpu, %error, "memory of the GPU cannot be read"));
        Self { device: CudaDevice::new(gpu), context: context.ok() }
    }

    /// Taken of the GPU by whomever.
    fn taken(&self) -> Option<u64> {
        self.context.as_ref()?.bind_to_thread().ok()?;
        let (free, total) = result::mem_get_info().ok()?;
        Some(total.saturating_sub(free) as u64)
    }
}

impl Gauge for GpuGauge {
    fn read(&self) -> PhasePeak {
        let usage = CudaRuntime::client(&self.device).memory_usage();
        let (in_use, reserved) = usage.map_or((0, 0), |usage| (usage.bytes_in_use, usage.bytes_reserved));
        PhasePeak { in_use, reserved, driver: self.taken().unwrap_or(0) }
    }

    fn gpu(&self) -> Option<String> {
        self.context.as_ref()?.name().ok()
    }
}
