//! From `launch.device` and the local rank to a device.

use coxswain_proto::run_spec::DeviceChoice;

use super::{Accelerator, Device, NoGpus};

/// What `wanted` comes to on this machine, for the `local_rank`-th worker on it.
///
/// Workers beyond the number of GPUs share: a GPU that a job's scheduler gives to one task is number 0 to it,
/// whatever its rank.
pub fn choose(
    wanted: DeviceChoice,
    local_rank: usize,
    accelerator: &dyn Accelerator,
) -> Result<Device, NoGpus> {
    match wanted {
        DeviceChoice::Cpu => Ok(Device::Cpu),
        DeviceChoice::Cuda => accelerator.probe().map(|gpus| Device::Cuda(local_rank % gpus.count)),
        DeviceChoice::Auto => Ok(match accelerator.probe() {
            Ok(gpus) => Device::Cuda(local_rank % gpus.count),
            Err(NoGpus::NotBuilt { driver: false } | NoGpus::NoDriver | NoGpus::NoGpu) => Device::Cpu,
            Err(missing) => {
                tracing::warn!("an NVIDIA driver is installed, but this worker uses the CPU: {missing}");
                Device::Cpu
            }
        }),
    }
}
