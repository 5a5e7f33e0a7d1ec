//! What a build with GPUs can do with them, and why a machine cannot.

use std::{
    fmt,
    path::{Path, PathBuf},
};

use coxswain_proto::{ids::Step, run_spec::RunSpec};
use coxswain_task::{ConvertJob, ForwardJob, GenerateJob, Losses, Reply, Responder, TaskError, Width};

use crate::{
    collective::{RingListener, TransportError, TransportSource},
    selftest::Finding,
    train::{HeldOutError, TrainError, UnknownTask},
    trainer::Trainer,
};

/// A version of NVIDIA's software.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// First number.
    pub major: u32,
    /// Second number.
    pub minor: u32,
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// What a machine has that can train on its GPUs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpus {
    /// GPUs that this process may use; at least one.
    pub count: usize,
    /// The newest CUDA that the driver runs.
    pub driver: Version,
    /// The compiler of our kernels.
    pub nvrtc: Version,
    /// Headers that kernels include.
    pub headers: PathBuf,
}

/// Why this process cannot compute on GPUs, and what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoGpus {
    /// Built without the feature.
    #[error(
        "this cox was built without the feature `cuda`; build it with `cargo build --release --features cuda`"
    )]
    NotBuilt {
        /// Whether this machine has the driver, so that only the build is missing.
        driver: bool,
    },
    /// `libcuda.so.1` cannot be loaded.
    #[error(
        "no NVIDIA driver (libcuda.so.1 cannot be loaded); install one, or in a container make the driver visible (--gpus all)"
    )]
    NoDriver,
    /// The driver answers with an error.
    #[error(
        "the NVIDIA driver refuses {call} (CUDA error {code}); check `nvidia-smi`, and that the driver's library and kernel module have the same version"
    )]
    Refused {
        /// The call.
        call: &'static str,
        /// Answer.
        code: i32,
    },
    /// A driver without a GPU.
    #[error(
        "the NVIDIA driver sees no GPU; check CUDA_VISIBLE_DEVICES, and that the container or job has a GPU"
    )]
    NoGpu,
    /// No compiler for kernels.
    #[error(
        "no NVRTC (libnvrtc.so.13 or .12 cannot be loaded): kernels are compiled when they are first used; install the CUDA runtime \
         compiler (package cuda-nvrtc, or nvidia-cuda-nvrtc of PyPI) and put its directory into LD_LIBRARY_PATH"
    )]
    NoCompiler,
    /// A compiler that is too old.
    #[error("NVRTC {found} is too old: install {needed} or newer (and a driver that supports it)")]
    OldCompiler {
        /// Version.
        found: Version,
        /// The oldest that does.
        needed: Version,
    },
    /// No headers for kernels.
    #[error(
        "no CUDA headers ({looked_at}): kernels include cuda_runtime.h, and crt/mma.h for tensor cores; install packages cuda-cudart-dev \
         and cuda-crt (or nvidia-cuda-runtime, nvidia-cuda-cccl and nvidia-cuda-crt of PyPI) and set CUDA_PATH to the directory that \
         holds include/"
    )]
    NoHeaders {
        /// Where they were looked for.
        looked_at: String,
    },
}

/// What a build can do with GPUs.
pub trait Accelerator: Sync {
    /// What this machine has; asked of the machine once in a process.
    fn probe(&self) -> Result<Gpus, NoGpus>;

    /// NCCL's version, `20000 + 100 * minor + patch`, or why there is none.
    fn nccl(&self) -> Result<u32, TransportError>;

    /// What it does on the GPUs that [`Accelerator::probe`] has found.
    fn on_gpu(&self) -> &dyn OnGpu;
}

/// What is done on a GPU. `gpu` is a number among those that the process sees, below [`Gpus::count`].
pub trait OnGpu {
    /// Trains a task, by its name, on a GPU.
    fn trainer(
        &self,
        task: &str,
        gpu: usize,
        listener: Option<RingListener>,
    ) -> Result<Box<dyn Trainer>, UnknownTask>;

    /// See [`Tasks::evaluate`](super::Tasks::evaluate).
    fn evaluate(
        &self,
        spec: &RunSpec,
        gpu: usize,
        ema: bool,
    ) -> Result<(Step, Option<HeldOutError>), TrainError>;

    /// See [`Tasks::responder`](super::Tasks::responder).
    fn responder(
        &self,
        spec: &RunSpec,
        dir: &Path,
        gpu: usize,
    ) -> Result<Option<Box<dyn Responder>>, TrainError>;

    /// See [`Tasks::forward`](super::Tasks::forward).
    fn forward(&self, job: &ForwardJob<'_>, gpu: usize) -> Option<Result<(), TaskError>>;

    /// See [`Tasks::generate`](super::Tasks::generate).
    fn generate(&self, job: &GenerateJob<'_>, gpu: usize) -> Result<Option<Vec<Reply>>, TrainError>;

    /// See [`Tasks::convert`](super::Tasks::convert).
    fn convert(&self, job: &ConvertJob<'_>, gpu: usize) -> Result<Option<Vec<Vec<PathBuf>>>, TrainError>;

    /// What carries large buffers between GPUs.
    fn transport(&self, gpu: usize) -> Box<dyn TransportSource>;

    /// What a GPU is asked first, for `cox selftest`: whether it computes, multiplies and keeps an order.
    fn first(&self, gpu: usize) -> Vec<Finding>;

    /// Copies and products, for `cox selftest`.
    fn measure(&self, gpu: usize) -> Vec<Finding>;

    /// A few steps of a small instance of each task that brings one, for `cox selftest`; in the order of the
    /// registry.
    fn few_steps(&self, gpu: usize, width: Width) -> Vec<(&'static str, Losses)>;
}

/// A build without GPUs.
#[derive(Clone, Copy, Debug)]
pub struct NoAccelerator {
    /// Whether the machine has the driver nonetheless.
    pub driver: fn() -> bool,
}

impl Accelerator for NoAccelerator {
    fn probe(&self) -> Result<Gpus, NoGpus> {
        Err(NoGpus::NotBuilt { driver: (self.driver)() })
    }

    fn nccl(&self) -> Result<u32, TransportError> {
        Err(TransportError(NoGpus::NotBuilt { driver: (self.driver)() }.to_string()))
    }

    /// [`choose`](super::choose) gives a GPU only where the probe has found one.
    fn on_gpu(&self) -> &dyn OnGpu {
        unreachable!("a GPU was chosen in a build without GPUs")
    }
}
