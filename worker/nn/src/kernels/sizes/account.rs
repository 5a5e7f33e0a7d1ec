//! A ledger of one's own.

use std::sync::{Mutex, PoisonError};

use super::{
    pages::Allocations,
    router::{Client, SizesDevice},
};

/// Devices that were used and are free again: burn keeps a client for each for good.
static FREE: Mutex<Free> = Mutex::new(Free { returned: Vec::new(), fresh: 0 });

struct Free {
    returned: Vec<u16>,
    fresh: u16,
}

/// A device whose ledger only the owner of this writes to.
#[derive(Debug)]
pub struct Account {
    device: SizesDevice,
    client: Client,
}

impl Account {
    /// Takes a device that is a CPU's memory.
    pub fn open() -> Self {
        Self::for_place(false)
    }

    /// Takes one that is a GPU's.
    pub fn open_on_gpu() -> Self {
        Self::for_place(true)
    }

    fn for_place(gpu: bool) -> Self {
        let mut free = FREE.lock().unwrap_or_else(PoisonError::into_inner);
        let number = free.returned.pop().unwrap_or_else(|| {
            free.fresh = free.fresh.wrapping_add(1);
            free.fresh
        });
        let device = SizesDevice(number);
        let account = Self { device, client: Client::for_device(device) };
        account.client.ledger().begin(gpu);
        account
    }

    /// Whether it is of a GPU's memory.
    pub fn is_gpu(&self) -> bool {
        self.client.ledger().gpu
    }

    /// Where to run.
    pub fn device(&self) -> &SizesDevice {
        &self.device
    }

    /// Bytes in use.
    pub fn in_use(&self) -> u64 {
        self.client.ledger().live
    }

    /// The most bytes in use since [`Account::restart`].
    pub fn peak(&self) -> u64 {
        self.client.ledger().peak
    }

    /// The largest buffer that a compute thread has kept for itself since [`Account::restart`].
    pub fn scratch(&self) -> u64 {
        self.client.ledger().scratch
    }

    /// Multiplications and additions since [`Account::restart`].
    pub fn flops(&self) -> u64 {
        self.client.ledger().flops
    }

    /// Lets the peak begin with what is in use now.
    pub fn restart_peak(&self) {
        self.client.ledger().restart_peak();
    }

    /// Lets the peak begin with what is in use now, and everything else with nothing.
    pub fn restart(&self) {
        let mut ledger = self.client.ledger();
        ledger.restart_peak();
        (ledger.scratch, ledger.flops) = (0, 0);
        ledger.allocations.0.clear();
    }

    /// What a GPU's memory was asked for since then; nothing of a CPU's.
    pub fn take_allocations(&self) -> Allocations {
        std::mem::take(&mut self.client.ledger().allocations)
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        FREE.lock().unwrap_or_else(PoisonError::into_inner).returned.push(self.device.0);
    }
}
