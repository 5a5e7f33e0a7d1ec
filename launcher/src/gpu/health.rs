//! What the driver says of the GPUs that a worker sees: for its check before it registers, and later.
//!
//! A worker counts the GPUs that CUDA shows it; the management library counts all of the machine. Which is
//! which is in `CUDA_VISIBLE_DEVICES`.

use std::{sync::OnceLock, time::Duration};

use coxswain_worker::health::device::{Driver as Reads, GpuHealth};

use super::Driver;
use crate::clock;

/// Reads the health of GPUs from the driver, where there is one.
pub struct Sensors {
    visible: Option<String>,
    /// Loaded when it is needed; none where there is none.
    driver: OnceLock<Option<Driver>>,
}

impl Sensors {
    /// For a process that sees these GPUs (`CUDA_VISIBLE_DEVICES`).
    pub fn new(visible: Option<String>) -> Self {
        Self { visible, driver: OnceLock::new() }
    }
}

impl Reads for Sensors {
    fn health(&self, gpu: usize) -> GpuHealth {
        // A worker that wanted a GPU is told elsewhere that there is none.
        let found = self.found(gpu);
        found.map_or_else(GpuHealth::default, |(driver, name)| driver.health(&name))
    }

    fn critical_error(&self, gpu: usize, within: Duration) -> Option<u64> {
        let began = clock::now();
        let found = self.found(gpu);
        let error = found.and_then(|(driver, name)| driver.critical_error(&name, within));
        if error.is_none() {
            // A driver that cannot tell answers at once.
            std::thread::sleep(within.saturating_sub(began.elapsed()));
        }
        error
    }
}

impl Sensors {
    fn found(&self, gpu: usize) -> Option<(&Driver, String)> {
        let driver = self.driver.get_or_init(|| Driver::load().ok()).as_ref()?;
        Some((driver, named(self.visible.as_deref(), gpu)?))
    }
}

/// What the management library calls the process's GPU of this number; none if that cannot be told.
fn named(visible: Option<&str>, gpu: usize) -> Option<String> {
    match visible.map(str::trim).filter(|visible| !visible.is_empty()) {
        None => Some(gpu.to_string()),
        // Instances of a partitioned GPU have no health of their own.
        Some(visible) => visible
            .split(',')
            .nth(gpu)
            .map(|name| name.trim().to_owned())
            .filter(|name| name.parse::<u32>().is_ok() || name.starts_with("GPU-")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_is_found_by_what_the_process_sees() {
        assert_eq!(named(None, 3), Some("3".to_owned()));
        assert_eq!(named(Some(""), 3), Some("3".to_owned()));
        assert_eq!(named(Some("2, 5"), 1), Some("5".to_owned()));
        assert_eq!(named(Some("GPU-8f0a, GPU-77"), 1), Some("GPU-77".to_owned()));
        assert_eq!(named(Some("MIG-8f0a"), 0), None);
        assert_eq!(named(Some("2"), 1), None);
    }

    #[test]
    fn where_there_is_no_driver_nothing_is_wrong_with_it() {
        if Driver::load().is_err() {
            assert!(Sensors::new(None).health(0).faults().is_empty());
        }
    }
}
