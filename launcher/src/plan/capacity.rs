//! Which memory a run is to fit in: a GPU asked for, a GPU that is here, `memory.capacity`, or the host's.

use coxswain_proto::run_spec::{DeviceChoice, RunSpec};
use serde::Serialize;

use crate::gpu::{
    Driver,
    named::{GpuKind, multiplies_bfloat16},
};

/// A memory that ranks run in.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Memory {
    /// What it is.
    pub name: String,
    /// Bytes.
    pub total: u64,
    /// Bytes that others hold.
    pub used: u64,
    /// Whether it is a GPU's.
    pub is_gpu: bool,
    /// Whether it is this machine's.
    pub is_here: bool,
    /// Whether it is a bound: the host's memory is none, since the system swaps and other programs come and
    /// go.
    pub is_bound: bool,
}

impl Memory {
    /// Bytes that a rank can have.
    pub fn capacity(&self) -> u64 {
        self.total.saturating_sub(self.used)
    }

    /// Whether it is a GPU's that multiplies bfloat16, or none of a GPU.
    pub fn multiplies_bfloat16(&self) -> bool {
        !self.is_gpu || multiplies_bfloat16(&self.name)
    }

    /// A GPU to plan for.
    pub fn of_gpu(gpu: GpuKind, is_here: bool) -> Self {
        Self { name: gpu.name, total: gpu.total, used: gpu.used, is_gpu: true, is_here, is_bound: true }
    }

    /// What `memory.capacity` allows a rank on the CPU.
    pub fn of_spec(spec: &RunSpec) -> Option<Self> {
        let total = spec.memory.capacity?;
        Some(Self {
            name: "memory.capacity".into(),
            total,
            used: 0,
            is_gpu: false,
            is_here: true,
            is_bound: true,
        })
    }

    /// A rank's share of the host's memory.
    pub fn of_host(local_ranks: u64) -> Self {
        let read = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let (total, available) = meminfo(&read);
        let share = |bytes: u64| bytes / local_ranks.max(1);
        Self {
            name: match local_ranks {
                0 | 1 => "this machine".into(),
                ranks => format!("one rank's share (1/{ranks}) of this machine"),
            },
            total: share(total),
            used: share(total.saturating_sub(available)),
            is_gpu: false,
            is_here: true,
            is_bound: false,
        }
    }

    /// The memories that a run computing on `device` would use on this machine: what it is bounded by, else
    /// its GPUs, else the host.
    pub fn here(spec: &RunSpec, device: DeviceChoice, local_ranks: u64) -> Vec<Self> {
        if let Some(bound) = Self::of_spec(spec) {
            return vec![bound];
        }
        let gpus = match device {
            DeviceChoice::Cpu => Vec::new(),
            _ => Driver::load().and_then(|driver| driver.gpus()).unwrap_or_default(),
        };
        match gpus.is_empty() {
            true => vec![Self::of_host(local_ranks)],
            false => gpus.iter().map(|gpu| Self::of_gpu(gpu.into(), true)).collect(),
        }
    }
}

/// Total and available bytes of `/proc/meminfo`.
fn meminfo(text: &str) -> (u64, u64) {
    let field = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim_start_matches(':').split_whitespace().next()?.parse::<u64>().ok()
    };
    let bytes = |name| field(name).unwrap_or(0) << 10;
    (bytes("MemTotal"), bytes("MemAvailable"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_memory_is_read_in_kibibytes() {
        let text = "MemTotal:       16 kB\nMemFree:         1 kB\nMemAvailable:    9 kB\n";
        assert_eq!(meminfo(text), (16 << 10, 9 << 10));
    }
}
