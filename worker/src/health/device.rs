//! What a driver says of a GPU, and whether it is to be used.

use std::time::Duration;

/// Reads what drivers say. The only implementation that asks a real one is the program's; tests have their
/// own.
pub trait Driver: Send + Sync {
    /// A GPU, by its number among those that this process sees.
    fn health(&self, gpu: usize) -> GpuHealth;

    /// The number of the first critical error (Xid) that comes of it within so long; none where none comes,
    /// or that cannot be told.
    fn critical_error(&self, _gpu: usize, within: Duration) -> Option<u64> {
        std::thread::sleep(within);
        None
    }
}

/// What a driver says of one GPU. What it does not tell (older ones, virtual GPUs) counts as sound.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GpuHealth {
    /// What people call it.
    pub name: String,
    /// Why the driver does not reach it any more.
    pub lost: Option<String>,
    /// Memory pages are to be retired, which takes a reset.
    pub pages_pending: bool,
    /// Memory errors since the driver was loaded that could not be corrected.
    pub uncorrected_errors: u64,
    /// Why it runs at lower clocks than it could: heat, power.
    pub slowed_by: Vec<&'static str>,
    /// Bytes that are free, of so many.
    pub free: Option<(u64, u64)>,
}

/// Less than this share of its memory is free: another process is there.
const LITTLE: u64 = 10;

impl GpuHealth {
    /// Why it is not to be used.
    pub fn faults(&self) -> Vec<String> {
        let lost = self.lost.as_ref().map(|why| format!("{}: the driver cannot reach it: {why}", self.name));
        let pages = self.pages_pending.then(|| {
            format!(
                "{}: memory pages with errors wait to be retired: reset the GPU (nvidia-smi --gpu-reset)",
                self.name
            )
        });
        lost.into_iter().chain(pages).collect()
    }

    /// What is worth knowing.
    pub fn worth_knowing(&self) -> Vec<String> {
        let errors = (self.uncorrected_errors > 0).then(|| {
            format!(
                "{}: uncorrectable memory errors since its driver was loaded: {}",
                self.name, self.uncorrected_errors
            )
        });
        let slowed = (!self.slowed_by.is_empty())
            .then(|| format!("{} runs at lower clocks: {}", self.name, self.slowed_by.join(", ")));
        let full = self.free.filter(|(free, total)| *free < total / LITTLE).map(|(free, total)| {
            format!(
                "{}: {} of {} MiB are free: another process uses this GPU (`cox gpu` names it)",
                self.name,
                free >> 20,
                total >> 20
            )
        });
        [errors, slowed, full].into_iter().flatten().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu() -> GpuHealth {
        GpuHealth { name: "GPU 3".into(), free: Some((70 << 30, 80 << 30)), ..GpuHealth::default() }
    }

    #[test]
    fn what_a_driver_does_not_tell_is_sound() {
        assert!(GpuHealth::default().faults().is_empty() && GpuHealth::default().worth_knowing().is_empty());
        assert!(gpu().faults().is_empty() && gpu().worth_knowing().is_empty());
    }

    #[test]
    fn a_gpu_that_needs_a_reset_is_not_used_and_one_that_is_hot_or_full_is() {
        let pending = GpuHealth { pages_pending: true, ..gpu() };
        assert!(pending.faults()[0].contains("reset the GPU"), "{:?}", pending.faults());
        let told = GpuHealth {
            uncorrected_errors: 2,
            slowed_by: vec!["heat", "power"],
            free: Some((1 << 30, 80 << 30)),
            ..gpu()
        };
        assert!(told.faults().is_empty());
        let lines = told.worth_knowing();
        assert_eq!(lines.len(), 3, "{lines:?}");
        assert!(lines[1].ends_with("heat, power") && lines[2].contains("1024 of 81920 MiB"), "{lines:?}");
    }
}
