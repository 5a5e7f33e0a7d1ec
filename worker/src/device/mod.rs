//! What a worker computes on, chosen at run time: the CPU, or one NVIDIA card.
//!
//! ```text
//! Accelerator   what a build with cards can do with them; `Absent` is its null object
//! choose        `launch.device` and the local rank to a device
//! chosen        a trainer that knows its device when it has read the run
//! ```
//!
//! One process computes on one device. `CUDA_VISIBLE_DEVICES` is the driver's business: it shows this process the cards it may use,
//! numbered from 0, and the local rank picks one of them.
//!
//! What this module does not do: instantiate anything for a card. All of burn's CUDA backend is generic, and costs minutes to
//! build wherever it is named; only the crate that implements [`Accelerator`] does.

mod chosen;
#[cfg(test)]
mod tests;

use std::{fmt, path::PathBuf};

use burn::backend::Flex;
use coxswain_proto::{
    ids::Step,
    run_spec::{DeviceChoice, RunSpec},
};

pub use self::chosen::ChosenTrainer;
use coxswain_nn::kernels::Tape;
use coxswain_task::{ForwardJob, Losses, TaskError, TaskOn, Width};

use crate::{
    collective::{FabricError, FabricSource, RingListener},
    selftest::{self, Finding, Sizes},
    train::{self, HeldOutError, TrainError},
    trainer::Trainer,
};

/// Where a worker's tensors live.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    /// Host memory.
    Cpu,
    /// The card of this number among those that the process sees.
    Cuda(usize),
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(card) => write!(f, "cuda:{card}"),
        }
    }
}

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

/// What a machine has that can train on its cards.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cards {
    /// Cards that this process may use; at least one.
    pub count: usize,
    /// The newest CUDA that the driver runs.
    pub driver: Version,
    /// The compiler of our kernels.
    pub nvrtc: Version,
    /// Headers that kernels include.
    pub headers: PathBuf,
}

/// Why this process cannot compute on cards, and what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoCards {
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
        "no NVIDIA driver (libcuda.so.1 cannot be loaded); install one, or in a container make it visible (--gpus all)"
    )]
    NoDriver,
    /// The driver answers with an error.
    #[error(
        "the NVIDIA driver refuses {call} (CUDA error {code}); check `nvidia-smi`, and that library and kernel module are of one version"
    )]
    Refused {
        /// The call.
        call: &'static str,
        /// Its answer.
        code: i32,
    },
    /// A driver without a card.
    #[error(
        "the NVIDIA driver sees no card; check CUDA_VISIBLE_DEVICES and the container's or the job's devices"
    )]
    NoCard,
    /// No compiler for kernels.
    #[error(
        "no NVRTC (libnvrtc.so.13 or .12 cannot be loaded): kernels are compiled when they are first used; install the CUDA runtime \
         compiler (package cuda-nvrtc, or nvidia-cuda-nvrtc of PyPI) and put its directory into LD_LIBRARY_PATH"
    )]
    NoCompiler,
    /// A compiler that is too old.
    #[error("NVRTC {found} is too old: kernels need {needed} or newer (and a driver for it)")]
    OldCompiler {
        /// Its version.
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

/// What a build can do with cards. `card` is a number among those that the process sees, below [`Cards::count`].
pub trait Accelerator: Sync {
    /// What this machine has; asked of the machine once in a process.
    fn probe(&self) -> Result<Cards, NoCards>;

    /// NCCL's version, `20000 + 100 * minor + patch`, or why there is none.
    fn nccl(&self) -> Result<u32, FabricError>;

    /// Trains a task, by its name, on a card.
    fn trainer(
        &self,
        task: &str,
        card: usize,
        listener: Option<RingListener>,
    ) -> Result<Box<dyn Trainer>, UnknownTask>;

    /// See [`Tasks::evaluate`].
    fn evaluate(&self, spec: &RunSpec, card: usize) -> Result<(Step, Option<HeldOutError>), TrainError>;

    /// See [`Tasks::forward`].
    fn forward(&self, job: &ForwardJob<'_>, card: usize) -> Option<Result<(), TaskError>>;

    /// What carries large buffers between cards.
    fn fabric(&self, card: usize) -> Box<dyn FabricSource>;

    /// Copies and products, for `cox selftest`.
    fn measure(&self, card: usize) -> Vec<Finding>;

    /// A few steps of a small instance of each task that brings one, for `cox selftest`; in the order of the registry.
    fn few_steps(&self, card: usize, width: Width) -> Vec<(&'static str, Losses)>;
}

/// A build without cards.
#[derive(Clone, Copy, Debug)]
pub struct Absent {
    /// Whether the machine has the driver nonetheless.
    pub driver: fn() -> bool,
}

impl Accelerator for Absent {
    fn probe(&self) -> Result<Cards, NoCards> {
        Err(NoCards::NotBuilt { driver: (self.driver)() })
    }

    fn nccl(&self) -> Result<u32, FabricError> {
        Err(FabricError(NoCards::NotBuilt { driver: (self.driver)() }.to_string()))
    }

    fn trainer(
        &self,
        _task: &str,
        card: usize,
        _listener: Option<RingListener>,
    ) -> Result<Box<dyn Trainer>, UnknownTask> {
        never(card)
    }

    fn evaluate(&self, _spec: &RunSpec, card: usize) -> Result<(Step, Option<HeldOutError>), TrainError> {
        never(card)
    }

    fn forward(&self, _job: &ForwardJob<'_>, card: usize) -> Option<Result<(), TaskError>> {
        never(card)
    }

    fn fabric(&self, card: usize) -> Box<dyn FabricSource> {
        never(card)
    }

    fn measure(&self, card: usize) -> Vec<Finding> {
        never(card)
    }

    fn few_steps(&self, card: usize, _width: Width) -> Vec<(&'static str, Losses)> {
        never(card)
    }
}

/// [`choose`] gives a card only where the probe has found one.
fn never(card: usize) -> ! {
    unreachable!("cuda:{card} was chosen in a build without cards")
}

/// What `wanted` comes to on this machine, for the `local_rank`-th worker on it.
///
/// Workers beyond the number of cards share: a card that a job's scheduler gives to one task is number 0 to it, whatever its rank.
pub fn choose(
    wanted: DeviceChoice,
    local_rank: usize,
    accelerator: &dyn Accelerator,
) -> Result<Device, NoCards> {
    match wanted {
        DeviceChoice::Cpu => Ok(Device::Cpu),
        DeviceChoice::Cuda => accelerator.probe().map(|cards| Device::Cuda(local_rank % cards.count)),
        DeviceChoice::Auto => Ok(match accelerator.probe() {
            Ok(cards) => Device::Cuda(local_rank % cards.count),
            Err(NoCards::NotBuilt { driver: false } | NoCards::NoDriver | NoCards::NoCard) => Device::Cpu,
            Err(missing) => {
                tracing::warn!("there is an NVIDIA driver, and still no way to use it: {missing}");
                Device::Cpu
            }
        }),
    }
}

/// What this program can train, and on what.
#[derive(Clone, Copy)]
pub struct Tasks {
    /// On the CPU; a task is known if it is here.
    pub cpu: &'static [&'static dyn TaskOn<Flex>],
    /// On GPUs, which knows its own list.
    pub accelerator: &'static dyn Accelerator,
}

impl Tasks {
    /// The task of a run; the specification has been checked, so there is one.
    pub fn of(&self, spec: &RunSpec) -> Result<&'static dyn TaskOn<Flex>, UnknownTask> {
        UnknownTask::unless_found(&spec.task.kind, self.cpu)
    }

    /// One forward pass from file to file, computed on `device`; nothing if no task has such a model.
    pub fn forward(&self, job: &ForwardJob<'_>, device: Device) -> Option<Result<(), TaskError>> {
        match device {
            Device::Cpu => self.cpu.iter().find_map(|task| task.forward(job, &Default::default())),
            Device::Cuda(card) => self.accelerator.forward(job, card),
        }
    }

    /// The held-out error of the newest checkpoint of a run, computed on `device`.
    pub fn evaluate(
        &self,
        spec: &RunSpec,
        device: Device,
    ) -> Result<(Step, Option<HeldOutError>), TrainError> {
        match device {
            Device::Cpu => train::evaluate_run(self.of(spec)?, spec, &Default::default()),
            Device::Cuda(card) => self.accelerator.evaluate(spec, card),
        }
    }
}

/// A run of a task that this program does not have.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("task.type: this cox does not know the task `{name}`; it knows {known}")]
pub struct UnknownTask {
    /// As the run names it.
    pub name: String,
    /// Those that there are.
    pub known: String,
}

impl UnknownTask {
    /// The task of this name among these.
    pub fn unless_found<B: Tape<Base = B>>(
        name: &str,
        tasks: &[&'static dyn TaskOn<B>],
    ) -> Result<&'static dyn TaskOn<B>, Self> {
        tasks.iter().find(|task| task.name() == name).copied().ok_or_else(|| Self {
            name: name.to_owned(),
            known: tasks.iter().map(|task| task.name()).collect::<Vec<_>>().join(", "),
        })
    }
}

/// Copies and products on `device`.
pub(crate) fn measure(device: Device, accelerator: &dyn Accelerator) -> Vec<Finding> {
    match device {
        Device::Cpu => {
            let sizes = Sizes { copy: 64 << 20, side: 768, rounds: 3, bf16: false };
            selftest::speed_in_host_memory::<Flex>(&Default::default(), sizes)
        }
        Device::Cuda(card) => accelerator.measure(card),
    }
}
