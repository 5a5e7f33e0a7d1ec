//! Coxswain on NVIDIA GPUs: whether they can be used, and the one place where training is instantiated for
//! them.
//!
//! ```text
//! libraries   the driver and NVRTC, looked for before they are needed
//! nvrtc       NVRTC with a memory
//! kept        compiled kernels, kept between processes
//! first       what a GPU is asked first
//! streams     the streams that cubecl has a GPU work in
//! order       what NCCL's work comes after
//! nccl        NCCL as the transport between GPUs
//! cublas      cuBLASLt for matrix products
//! gauge       memory of a GPU, as its allocator and its driver tell it
//! here        the worker's generic code, once, for burn's CUDA backend
//! ```
//!
//! burn's CUDA backend is generic down to its kernels' launches, so a crate that names it builds all of it.
//! This crate does, once; none of its functions is generic, and it is built without optimisation in dev.
//!
//! Building needs no CUDA toolkit. At run time the driver, NVRTC, CUDA's headers and, between GPUs, NCCL are
//! loaded; what is missing is said in words ([`NoGpus`]).

mod clock;
mod cublas;
mod first;
mod gauge;
mod kept;
mod libraries;
mod nccl;
mod nvrtc;
mod order;
mod streams;
#[cfg(test)]
mod tests;

use std::{
    path::{Path, PathBuf},
    sync::OnceLock,
};

pub use burn_cuda::Cuda;
use burn_cuda::CudaDevice;
use coxswain_models::Shelves;
use coxswain_proto::{ids::Step, run_spec::RunSpec};
use coxswain_task::{
    ConvertJob, ForwardJob, GenerateJob, Losses, Reply, Responder, TaskError, TaskOn, Width,
};
use coxswain_worker::{
    collective::{RingListener, TransportError, TransportSource},
    device::{Accelerator, Gpus, NoGpus, OnGpu, Version},
    selftest::{self, Finding, Sizes},
    train::{HeldOutError, TaskTrainer, TrainError, TrainerOptions, UnknownTask, evaluate_run},
    trainer::Trainer,
};

use self::{gauge::GpuGauge, kept::Kernels, libraries::NoDriver, nccl::NcclTransport, nvrtc::StandIn};

/// cubecl writes `__tanhf` into its kernels whatever the compiler; this version is the first to know it.
const NEEDED: Version = Version { major: 12, minor: 8 };
/// What kernels include: all of them the first, those that use tensor cores the second. Without the second
/// every one of those would fail to compile, and be passed over in silence for one that does without.
const HEADERS: [&str; 2] = ["cuda_runtime.h", "crt/mma.h"];

/// NVIDIA's GPUs, and what they can train.
#[derive(Clone, Copy, Debug)]
pub struct Nvidia {
    /// All tasks.
    pub tasks: fn() -> Vec<&'static dyn TaskOn<Cuda>>,
}

/// The tasks of this repository. Instantiated here; a program with tasks of its own adds to them.
pub fn standard() -> Vec<&'static dyn TaskOn<Cuda>> {
    coxswain_tasks::on::<Cuda>(Shelves::default())
}

/// NVIDIA's GPUs with the tasks of this repository.
pub const NVIDIA: Nvidia = Nvidia { tasks: standard };

impl Nvidia {
    /// Who multiplies matrices, in words: "cuBLASLt 13.0.0", say. Of use once GPUs were looked for.
    pub fn multiplier(&self) -> String {
        cublas::told()
    }

    /// The task of this name.
    fn named(&self, name: &str) -> Result<&'static dyn TaskOn<Cuda>, UnknownTask> {
        UnknownTask::unless_found(name, &(self.tasks)())
    }
}

impl Accelerator for Nvidia {
    fn probe(&self) -> Result<Gpus, NoGpus> {
        static FOUND: OnceLock<Result<Gpus, NoGpus>> = OnceLock::new();
        FOUND.get_or_init(look).clone()
    }

    fn nccl(&self) -> Result<u32, TransportError> {
        nccl::version()
    }

    fn on_gpu(&self) -> &dyn OnGpu {
        self
    }
}

impl OnGpu for Nvidia {
    fn trainer(
        &self,
        task: &str,
        gpu: usize,
        listener: Option<RingListener>,
    ) -> Result<Box<dyn Trainer>, UnknownTask> {
        let options = TrainerOptions { device: CudaDevice::new(gpu), listener };
        let gauge = Box::new(GpuGauge::new(gpu));
        Ok(Box::new(TaskTrainer::new(self.named(task)?, options).on_gpu(self.transport(gpu), gauge)))
    }

    fn evaluate(
        &self,
        spec: &RunSpec,
        gpu: usize,
        ema: bool,
    ) -> Result<(Step, Option<HeldOutError>), TrainError> {
        evaluate_run(self.named(&spec.task.kind)?, spec, &CudaDevice::new(gpu), ema)
    }

    fn responder(
        &self,
        spec: &RunSpec,
        dir: &Path,
        gpu: usize,
    ) -> Result<Option<Box<dyn Responder>>, TrainError> {
        let task = self.named(&spec.task.kind)?;
        Ok(task.responder(spec, dir, &CudaDevice::new(gpu)).transpose()?)
    }

    fn forward(&self, job: &ForwardJob<'_>, gpu: usize) -> Option<Result<(), TaskError>> {
        (self.tasks)().iter().find_map(|task| task.forward(job, &CudaDevice::new(gpu)))
    }

    fn generate(&self, job: &GenerateJob<'_>, gpu: usize) -> Result<Option<Vec<Reply>>, TrainError> {
        let task = self.named(&job.spec.task.kind)?;
        Ok(task.generate(job, &CudaDevice::new(gpu)).transpose()?)
    }

    fn convert(&self, job: &ConvertJob<'_>, gpu: usize) -> Result<Option<Vec<Vec<PathBuf>>>, TrainError> {
        let task = self.named(&job.spec.task.kind)?;
        Ok(task.convert(job, &CudaDevice::new(gpu)).transpose()?)
    }

    fn transport(&self, gpu: usize) -> Box<dyn TransportSource> {
        Box::new(NcclTransport::new(gpu))
    }

    fn first(&self, gpu: usize) -> Vec<Finding> {
        let mut found = first::findings(gpu);
        found.push(Finding::told("machine", "kernels", kept::told()));
        found
    }

    fn measure(&self, gpu: usize) -> Vec<Finding> {
        let sizes = Sizes { copy: 512 << 20, side: 8192, rounds: 5, bf16: true };
        let mut findings = vec![Finding::told("machine", "large matmuls", cublas::told())];
        findings.extend(selftest::speed::<Cuda>(&CudaDevice::new(gpu), sizes));
        findings
    }

    fn few_steps(&self, gpu: usize, width: Width) -> Vec<(&'static str, Losses)> {
        let device = CudaDevice::new(gpu);
        let tried = |task: &&'static dyn TaskOn<Cuda>| Some((task.name(), task.few_steps(&device, width)?));
        (self.tasks)().iter().filter_map(tried).collect()
    }
}

fn look() -> Result<Gpus, NoGpus> {
    let driver = libraries::driver().map_err(|error| match error {
        NoDriver::Absent => NoGpus::NoDriver,
        NoDriver::Refuses(call, code) => NoGpus::Refused { call, code },
    })?;
    if driver.gpus == 0 {
        return Err(NoGpus::NoGpu);
    }
    // Before NVRTC, whose name it takes.
    let stand_in = kept::place().and_then(StandIn::load);
    let (compiler, nvrtc) = libraries::nvrtc().ok_or(NoGpus::NoCompiler)?;
    if nvrtc < NEEDED {
        return Err(NoGpus::OldCompiler { found: nvrtc, needed: NEEDED });
    }
    if let Some(stand_in) = stand_in {
        let kernels = Kernels::open(&stand_in.place, nvrtc, driver.cuda);
        stand_in.answer(compiler, kernels);
    }
    cublas::register();
    // Where cubecl will look; it panics if there is no such place.
    let home = cubecl::cuda::install::cuda_path();
    let headers = home.map(|home| home.join("include"));
    let headers = headers.ok_or_else(|| NoGpus::NoHeaders {
        looked_at: "CUDA_PATH is not set, and there is no /usr/local/cuda".to_owned(),
    })?;
    let missing = HEADERS.iter().map(|header| headers.join(header)).find(|header| !header.is_file());
    if let Some(missing) = missing {
        return Err(NoGpus::NoHeaders { looked_at: format!("{} does not exist", missing.display()) });
    }
    Ok(Gpus { count: driver.gpus, driver: driver.cuda, nvrtc, headers })
}
