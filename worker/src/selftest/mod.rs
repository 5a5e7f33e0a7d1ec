//! What a platform engineer wants to know of a new node, in one page: `cox selftest`.
//!
//! ```text
//! findings   what was found, line by line, with a verdict where there is one
//! speed      bandwidth to and from the device, and its rate in matrix products
//! links      every collective between ranks of this machine: verified, then timed
//! step       a small model trained for a few steps, against the CPU's numbers
//! ```
//!
//! It brings everything along: no model, no data set, no network beyond the loopback interface, nothing left
//! behind. It takes seconds, so it says whether a node works, not how fast a run will be.

mod findings;
mod links;
mod speed;
mod step;

pub(crate) use self::speed::speed_in_host_memory;
pub use self::{
    findings::{Finding, Grade},
    speed::{Sizes, speed},
};
use coxswain_task::Width;

use crate::device::{self, Accelerator, Device, Tasks};

/// Runs everything that this device can do. A failure is among the findings.
pub fn run(device: Device, tasks: Tasks) -> Vec<Finding> {
    let accelerator = tasks.accelerator;
    let mut found = first(device, accelerator);
    found.extend(device::measure(device, accelerator));
    found.extend(links::links(device, accelerator));
    let on_cpu = tasks.cpu.iter().filter_map(|task| {
        let losses = task.few_steps(&Default::default(), Width::Float32)?;
        Some((task.name(), task.known_losses(), losses))
    });
    let on_cpu: Vec<_> = on_cpu.collect();
    found.extend(on_cpu.iter().map(|(_, stored, losses)| step::compared_with_stored(losses, stored)));
    if let Device::Cuda(gpu) = device {
        for width in [Width::Float32, Width::Bfloat16] {
            for (name, losses) in accelerator.on_gpu().few_steps(gpu, width) {
                let reference = on_cpu.iter().find(|(task, ..)| *task == name);
                found.extend(reference.map(|(_, _, reference)| step::compared(width, reference, &losses)));
            }
        }
    }
    found
}

/// What is there, and what a GPU is asked before anything else, in seconds.
pub fn first(device: Device, accelerator: &dyn Accelerator) -> Vec<Finding> {
    let mut found = environment(accelerator);
    if let Device::Cuda(gpu) = device {
        found.extend(accelerator.on_gpu().first(gpu));
    }
    found
}

/// What this machine brings, on whatever it will compute.
fn environment(accelerator: &dyn Accelerator) -> Vec<Finding> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let mut found = vec![
        Finding::told("machine", "cox", env!("CARGO_PKG_VERSION")),
        Finding::told("machine", "processor", format!("{cores} cores for this process, {}", vectors())),
        Finding::told("machine", "compute threads", rayon::current_num_threads()),
    ];
    match accelerator.probe() {
        Ok(gpus) => found.extend([
            Finding::told("machine", "GPUs", gpus.count),
            Finding::told("machine", "CUDA of the driver", gpus.driver),
            Finding::told("machine", "NVRTC", gpus.nvrtc),
            Finding::told("machine", "CUDA headers", gpus.headers.display()),
        ]),
        Err(missing) => found.push(Finding::told("machine", "GPUs", format!("none usable: {missing}"))),
    }
    found.push(match accelerator.nccl() {
        Ok(version) => {
            let (major, minor, patch) = (version / 10_000, version / 100 % 100, version % 100);
            Finding::told("machine", "NCCL", format!("{major}.{minor}.{patch}"))
        }
        Err(missing) => Finding::told("machine", "NCCL", format!("none usable: {missing}")),
    });
    found
}

/// The widest vector instructions that kernels here choose between.
fn vectors() -> &'static str {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f") {
            return "AVX-512";
        }
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            return "AVX2";
        }
    }
    "baseline vector instructions"
}

#[cfg(test)]
mod tests {
    use burn::backend::Flex;
    use coxswain_task::TaskOn;
    use coxswain_tasks::vla_flow::VlaFlow;

    use super::*;

    #[test]
    fn a_cpu_passes_and_says_so_line_by_line() {
        let task: &dyn TaskOn<Flex> = coxswain_tasks::leaked(VlaFlow::<Flex>::default());
        let tasks =
            Tasks { cpu: vec![task].leak(), accelerator: &device::NoAccelerator { driver: || false } };
        let found = run(Device::Cpu, tasks);
        let failed: Vec<_> = found.iter().filter(|finding| finding.failed()).collect();
        assert!(failed.is_empty(), "{failed:?}");
        for section in ["machine", "speed", "collectives", "training"] {
            assert!(found.iter().any(|finding| finding.section == section), "{section}");
        }
        assert!(found.iter().filter(|finding| finding.verdict == Grade::Passed).count() >= 8);
    }
}
