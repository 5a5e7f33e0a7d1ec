//! Whether the machine under a worker is sound: looked at before each process registers, so after each fault
//! of its slot, too.
//!
//! ```text
//! known    a short computation whose result is known, on the device that trains
//! device   what the driver says of the GPU
//! disk     a file can be written where checkpoints go, and there is room
//! memory   what the system can still give
//! kind     which processors come to the same bits
//! watch    what the driver says of the GPU later, while the worker lives
//! ```
//!
//! A check that is not passed ends the process before it has registered, as a fault of its slot's hardware
//! (`faults.cordon_after`). What is only worth knowing is told, and counts for nothing: a full disk, little
//! memory, a GPU that slows itself down, a clock that differs.
//!
//! What this does not do: stress anything. It takes milliseconds, so that a restart stays one.

pub mod device;
mod disk;
mod fault;
pub mod kind;
pub mod known;
mod memory;
pub mod watch;

use std::{path::Path, time::Duration};

use self::fault::{Check, InjectedFault};
use crate::device::Device;

/// How long a disk may take for a small file that is to be durable, before it counts as one that hangs.
const DISK_PATIENCE: Duration = Duration::from_secs(20);
/// Clocks further apart than this make logs of several machines hard to read, and certificates fail.
const CLOCKS_APART: Duration = Duration::from_secs(2);

/// What is looked at, besides memory and the device check.
pub struct Site<'a> {
    /// Where checkpoints go.
    pub output_dir: &'a Path,
    /// What computes.
    pub device: Device,
    /// Reads what drivers say of GPUs; none where that is not known.
    pub driver: Option<&'a dyn device::Driver>,
}

/// Looks at everything but the device check, which runs where the trainer computes. What is worth knowing;
/// or, as an error, why this machine is not to be used.
pub fn check(site: &Site<'_>) -> Result<Vec<String>, String> {
    let mut worth_knowing = Vec::new();
    if let Some(fault) = InjectedFault::for_check(Check::Device) {
        return Err(fault);
    }
    if let (Device::Cuda(gpu), Some(driver)) = (site.device, site.driver) {
        let health = driver.health(gpu);
        if let Some(fault) = health.faults().into_iter().next() {
            return Err(fault);
        }
        worth_knowing.extend(health.worth_knowing());
    }
    if let Some(fault) = InjectedFault::for_check(Check::Disk) {
        return Err(fault);
    }
    worth_knowing.extend(disk::check(site.output_dir, DISK_PATIENCE)?);
    worth_knowing.extend(memory::little());
    Ok(worth_knowing)
}

/// Whether a machine's clock is to be looked at: `ours` and `theirs` are times since the Unix epoch, of which
/// ours was read within `within` of theirs.
pub fn clocks_differ(ours: Duration, theirs: Duration, within: Duration) -> Option<String> {
    let apart = ours.abs_diff(theirs);
    (apart > CLOCKS_APART + within).then(|| {
        let (seconds, side) = (apart.as_secs_f64(), if ours > theirs { "ahead of" } else { "behind" });
        format!(
            "this machine's clock is {seconds:.1} s {side} the coordinator's: synchronise both with NTP; training is not \
             affected, but times in logs and the validity of certificates are"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cpu_and_a_writable_directory_pass() {
        let dir = tempfile::tempdir().expect("there is room");
        let site = Site { output_dir: dir.path(), device: Device::Cpu, driver: None };
        check(&site).expect("nothing is wrong here");
        assert_eq!(std::fs::read_dir(dir.path()).expect("it is there").count(), 0, "nothing is left behind");
    }

    #[test]
    fn a_gpu_that_its_driver_gives_up_is_not_used() {
        struct LostGpu;
        impl device::Driver for LostGpu {
            fn health(&self, gpu: usize) -> device::GpuHealth {
                device::GpuHealth {
                    name: format!("GPU {gpu}"),
                    lost: Some("it is lost".into()),
                    ..Default::default()
                }
            }
        }
        let dir = tempfile::tempdir().expect("there is room");
        let site = |device| Site { output_dir: dir.path(), device, driver: Some(&LostGpu) };
        assert!(
            check(&site(Device::Cuda(3))).is_err_and(|why| why.contains("GPU 3") && why.contains("lost"))
        );
        check(&site(Device::Cpu)).expect("it does not use the GPU");
    }

    #[test]
    fn a_clock_is_named_once_it_is_further_off_than_the_answer_took() {
        let at = Duration::from_millis;
        assert_eq!(clocks_differ(at(10_000), at(11_900), at(0)), None);
        assert_eq!(clocks_differ(at(10_000), at(13_000), at(1_500)), None, "the answer took that long");
        let ahead = clocks_differ(at(22_500), at(10_000), at(5)).expect("it is off");
        assert!(ahead.contains("12.5 s ahead of"), "{ahead}");
        assert!(clocks_differ(at(0), at(9_000), at(5)).is_some_and(|behind| behind.contains("9.0 s behind")));
    }
}
