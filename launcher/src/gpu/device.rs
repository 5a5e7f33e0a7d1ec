//! GPUs of this machine, and the most that was seen in use on them.

use serde::Serialize;

/// A GPU of this machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Gpu {
    /// Number in the driver's order.
    pub index: u32,
    /// Product name.
    pub name: String,
    /// Bytes of memory.
    pub total: u64,
    /// Bytes in use, by any process.
    pub used: u64,
    /// Bytes free.
    pub free: u64,
    /// CUDA compute capability, `9.0`.
    pub compute_capability: Option<String>,
    /// Streaming multiprocessors.
    pub multiprocessors: Option<u32>,
    /// Who computes on it.
    pub processes: Vec<GpuProcess>,
}

/// A process that computes on a GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct GpuProcess {
    /// Id.
    pub pid: u32,
    /// Command, where this user may see it.
    pub command: Option<String>,
    /// Bytes it holds on the GPU, where the driver tells.
    pub used: Option<u64>,
}

/// The largest use seen of each GPU since the last reset.
#[derive(Clone, Debug, Default)]
pub struct Peaks(std::collections::BTreeMap<u32, u64>);

impl Peaks {
    /// Takes note of what is in use now.
    pub fn observe(&mut self, gpus: &[Gpu]) {
        for gpu in gpus {
            let peak = self.0.entry(gpu.index).or_default();
            *peak = gpu.used.max(*peak);
        }
    }

    /// Forgets everything.
    pub fn reset(&mut self) {
        self.0.clear();
    }

    /// The largest use seen of a GPU.
    pub fn peak(&self, gpu: &Gpu) -> u64 {
        self.0.get(&gpu.index).copied().unwrap_or(gpu.used)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(used: u64) -> Gpu {
        Gpu {
            index: 0,
            name: "GPU".into(),
            total: 100,
            used,
            free: 100 - used,
            compute_capability: None,
            multiprocessors: None,
            processes: Vec::new(),
        }
    }

    #[test]
    fn a_peak_stays_until_it_is_reset() {
        let mut peaks = Peaks::default();
        for used in [10, 70, 20] {
            peaks.observe(&[gpu(used)]);
        }
        assert_eq!(peaks.peak(&gpu(20)), 70);
        peaks.reset();
        assert_eq!(peaks.peak(&gpu(20)), 20);
    }
}
