//! What a card holds, read from cubecl's allocator and from the driver.

use std::sync::Arc;

use burn_cuda::CudaDevice;
use coxswain_worker::memory::{Gauge, PhasePeak};
use cubecl::{Runtime, cuda::CudaRuntime};
use cudarc::driver::{CudaContext, result};

/// Reads one card.
#[derive(Debug)]
pub struct CardGauge {
    device: CudaDevice,
    /// The card's primary context, which burn uses as well; none if the driver refused it.
    context: Option<Arc<CudaContext>>,
}

impl CardGauge {
    /// Of the card of this number among those that the process sees.
    pub fn new(card: usize) -> Self {
        let context = CudaContext::new(card)
            .inspect_err(|error| tracing::warn!(card, %error, "memory of the card cannot be read"));
        Self { device: CudaDevice::new(card), context: context.ok() }
    }

    /// Taken of the card by whomever.
    fn taken(&self) -> Option<u64> {
        self.context.as_ref()?.bind_to_thread().ok()?;
        let (free, total) = result::mem_get_info().ok()?;
        Some(total.saturating_sub(free) as u64)
    }
}

impl Gauge for CardGauge {
    fn read(&self) -> PhasePeak {
        let usage = CudaRuntime::client(&self.device).memory_usage();
        let (in_use, reserved) = usage.map_or((0, 0), |usage| (usage.bytes_in_use, usage.bytes_reserved));
        PhasePeak { in_use, reserved, driver: self.taken().unwrap_or(0) }
    }

    fn card(&self) -> Option<String> {
        self.context.as_ref()?.name().ok()
    }
}
