//! The driver's management library, loaded at run time.

use std::time::Duration;

use coxswain_worker::health::device::GpuHealth;
use nvml_wrapper::{
    Device, Nvml,
    bitmasks::{device::ThrottleReasons, event::EventTypes},
    enum_wrappers::device::{EccCounter, MemoryError},
    enums::{device::UsedGpuMemory, event::XidError},
    error::NvmlError,
};

use super::{Gpu, GpuProcess};

/// The driver's own name; the one without a version comes with developer packages only.
const LIBRARY: &str = "libnvidia-ml.so.1";

/// Why nothing is known of GPUs.
#[derive(Debug, thiserror::Error)]
pub enum NoGpu {
    /// The library is not there.
    #[error(
        "no NVIDIA driver on this machine ({LIBRARY} cannot be loaded): install one, or in a container make the driver visible \
         (--gpus all); runs on the CPU need none"
    )]
    NoDriver,
    /// The library is there, and the driver is not.
    #[error("no NVIDIA driver is loaded ({0}); check `nvidia-smi`")]
    NotLoaded(NvmlError),
    /// There is a driver, and no GPU.
    #[error("no NVIDIA GPU: the driver is loaded and sees none; check the container's or the job's devices")]
    NoneFound,
    /// The driver refuses an answer.
    #[error("the NVIDIA driver failed a query ({what}): {source}")]
    Refused {
        /// What it was asked.
        what: &'static str,
        /// What it said.
        source: NvmlError,
    },
}

/// The loaded driver.
pub struct Driver(Nvml);

impl Driver {
    /// Loads the library and connects to the driver.
    pub fn load() -> Result<Self, NoGpu> {
        let nvml = Nvml::builder().lib_path(LIBRARY.as_ref()).init();
        nvml.map(Self).map_err(|error| match error {
            NvmlError::LibloadingError(_) => NoGpu::NoDriver,
            error => NoGpu::NotLoaded(error),
        })
    }

    /// Version, for people.
    pub fn version(&self) -> Option<String> {
        self.0.sys_driver_version().ok()
    }

    /// What it says of the health of a GPU, by its number or, behind `GPU-`, its UUID.
    pub fn health(&self, gpu: &str) -> GpuHealth {
        let found = self.device(gpu);
        let name = format!("GPU {gpu}");
        match found {
            Ok(device) => health(&device, name),
            Err(NvmlError::GpuLost) => {
                GpuHealth { lost: Some(NvmlError::GpuLost.to_string()), name, ..GpuHealth::default() }
            }
            // What the driver does not know by this name is not this process's to judge.
            Err(_) => GpuHealth { name, ..GpuHealth::default() },
        }
    }

    /// The first critical error that it reports of a GPU within so long. One that comes while nobody waits is
    /// not told.
    pub fn critical_error(&self, gpu: &str, within: Duration) -> Option<u64> {
        let events = self.0.create_event_set().ok()?;
        let device = self.device(gpu).ok()?;
        let events = device.register_events(EventTypes::CRITICAL_XID_ERROR, events).ok()?;
        let event = events.wait(u32::try_from(within.as_millis()).unwrap_or(u32::MAX)).ok()?;
        match event.event_data? {
            XidError::Value(number) => Some(number),
            XidError::Unknown => None,
        }
    }

    fn device(&self, gpu: &str) -> Result<Device<'_>, NvmlError> {
        match gpu.parse() {
            Ok(index) => self.0.device_by_index(index),
            Err(_) => self.0.device_by_uuid(gpu),
        }
    }

    /// All GPUs, as they are now. At least one.
    pub fn gpus(&self) -> Result<Vec<Gpu>, NoGpu> {
        let refused = |what| move |source| NoGpu::Refused { what, source };
        let count = self.0.device_count().map_err(refused("number of GPUs"))?;
        let gpu = |index| describe(index, &self.0.device_by_index(index).map_err(refused("GPU"))?);
        match count {
            0 => Err(NoGpu::NoneFound),
            count => (0..count).map(gpu).collect(),
        }
    }
}

/// Older drivers and virtual GPUs do not tell all of this.
fn health(device: &Device<'_>, name: String) -> GpuHealth {
    let memory = device.memory_info();
    let slowed = [
        (ThrottleReasons::HW_THERMAL_SLOWDOWN, "temperature (hardware limit)"),
        (ThrottleReasons::SW_THERMAL_SLOWDOWN, "temperature (driver limit)"),
        (ThrottleReasons::HW_POWER_BRAKE_SLOWDOWN, "power (hardware limit)"),
    ];
    let reasons = device.current_throttle_reasons().unwrap_or_else(|_| ThrottleReasons::empty());
    GpuHealth {
        lost: matches!(memory, Err(NvmlError::GpuLost)).then(|| NvmlError::GpuLost.to_string()),
        pages_pending: device.are_pages_pending_retired().unwrap_or(false),
        uncorrected_errors: device
            .total_ecc_errors(MemoryError::Uncorrected, EccCounter::Volatile)
            .unwrap_or(0),
        slowed_by: slowed.into_iter().filter(|(of, _)| reasons.contains(*of)).map(|(_, why)| why).collect(),
        free: memory.ok().map(|memory| (memory.free, memory.total)),
        name,
    }
}

fn describe(index: u32, device: &Device<'_>) -> Result<Gpu, NoGpu> {
    let memory = device.memory_info().map_err(|source| NoGpu::Refused { what: "memory of a GPU", source })?;
    // What older drivers and virtual GPUs do not tell is left out rather than refused.
    let capability = device.cuda_compute_capability().ok();
    let multiprocessors = capability.as_ref().zip(device.num_cores().ok()).and_then(|(capability, cores)| {
        cores_each(capability.major, capability.minor).map(|each| cores / each)
    });
    Ok(Gpu {
        index,
        name: device.name().unwrap_or_else(|_| "unnamed".into()),
        total: memory.total,
        used: memory.used,
        free: memory.free,
        compute_capability: capability.map(|c| format!("{}.{}", c.major, c.minor)),
        multiprocessors,
        processes: processes(device),
    })
}

fn processes(device: &Device<'_>) -> Vec<GpuProcess> {
    let running = device.running_compute_processes().unwrap_or_default();
    let process = |process: nvml_wrapper::struct_wrappers::device::ProcessInfo| GpuProcess {
        pid: process.pid,
        command: std::fs::read_to_string(format!("/proc/{}/comm", process.pid))
            .ok()
            .map(|command| command.trim().to_owned()),
        used: match process.used_gpu_memory {
            UsedGpuMemory::Used(bytes) => Some(bytes),
            UsedGpuMemory::Unavailable => None,
        },
    };
    running.into_iter().map(process).collect()
}

/// CUDA cores of a streaming multiprocessor (CUDA C++ programming guide, table of throughputs by compute
/// capability): the driver counts cores only.
fn cores_each(major: i32, minor: i32) -> Option<u32> {
    match (major, minor) {
        (3, _) => Some(192),
        (5, _) | (6, 1 | 2) => Some(128),
        (6, 0) | (7, _) | (8, 0) => Some(64),
        (8..=12, _) => Some(128),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_gpus_have_the_multiprocessors_on_their_data_sheets() {
        // (cores, capability, multiprocessors): V100, T4, A100, RTX 3090, L40S, H100.
        for (cores, (major, minor), expected) in [
            (5_120, (7, 0), 80),
            (2_560, (7, 5), 40),
            (6_912, (8, 0), 108),
            (10_496, (8, 6), 82),
            (18_176, (8, 9), 142),
            (16_896, (9, 0), 132),
        ] {
            assert_eq!(cores_each(major, minor).map(|each| cores / each), Some(expected));
        }
    }

    #[test]
    fn a_machine_without_a_driver_is_told_so_in_words() {
        if let Err(missing) = Driver::load() {
            assert!(missing.to_string().starts_with("no NVIDIA"), "{missing}");
        }
    }
}
