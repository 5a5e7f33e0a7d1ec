//! What this program can train, and on what.

use std::path::{Path, PathBuf};

use burn::backend::Flex;
use coxswain_proto::{ids::Step, run_spec::RunSpec};
use coxswain_task::{ConvertJob, ForwardJob, GenerateJob, Reply, Responder, TaskError, TaskOn};

use super::{Accelerator, Device, computing::begin_computing};
use crate::{
    selftest::{self, Finding, Sizes},
    train::{self, ExportJob, ExportSummary, HeldOutError, TrainError, UnknownTask},
};

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
            Device::Cuda(gpu) => self.accelerator.on_gpu().forward(job, gpu),
        }
    }

    /// Writes what a user takes away of a checkpoint of a run; on the CPU, which every machine has.
    pub fn export(&self, spec: &RunSpec, job: &ExportJob) -> Result<ExportSummary, TrainError> {
        train::export_run(self.of(spec)?, spec, job, &Default::default())
    }

    /// What a run has left in `dir`, ready to answer requests on `device`, and on the calling thread; nothing
    /// if its task answers none.
    pub fn responder(
        &self,
        spec: &RunSpec,
        dir: &Path,
        device: Device,
    ) -> Result<Option<Box<dyn Responder>>, TrainError> {
        begin_computing(spec);
        match device {
            Device::Cpu => Ok(self.of(spec)?.responder(spec, dir, &Default::default()).transpose()?),
            Device::Cuda(gpu) => self.accelerator.on_gpu().responder(spec, dir, gpu),
        }
    }

    /// Answers to prompts, computed on `device`; nothing if what the run's task trains writes no text.
    pub fn generate(&self, job: &GenerateJob<'_>, device: Device) -> Result<Option<Vec<Reply>>, TrainError> {
        begin_computing(job.spec);
        match device {
            Device::Cpu => Ok(self.of(job.spec)?.generate(job, &Default::default()).transpose()?),
            Device::Cuda(gpu) => self.accelerator.on_gpu().generate(job, gpu),
        }
    }

    /// Files made of files, computed on `device`: what was written for each; nothing if what the run's task
    /// trains makes none.
    pub fn convert(
        &self,
        job: &ConvertJob<'_>,
        device: Device,
    ) -> Result<Option<Vec<Vec<PathBuf>>>, TrainError> {
        begin_computing(job.spec);
        match device {
            Device::Cpu => Ok(self.of(job.spec)?.convert(job, &Default::default()).transpose()?),
            Device::Cuda(gpu) => self.accelerator.on_gpu().convert(job, gpu),
        }
    }

    /// The held-out error of the newest checkpoint of a run, computed on `device`; with `ema` that of the
    /// average of its weights.
    pub fn evaluate(
        &self,
        spec: &RunSpec,
        device: Device,
        ema: bool,
    ) -> Result<(Step, Option<HeldOutError>), TrainError> {
        match device {
            Device::Cpu => train::evaluate_run(self.of(spec)?, spec, &Default::default(), ema),
            Device::Cuda(gpu) => self.accelerator.on_gpu().evaluate(spec, gpu, ema),
        }
    }
}

/// Copies and products on `device`.
pub(crate) fn measure(device: Device, accelerator: &dyn Accelerator) -> Vec<Finding> {
    match device {
        Device::Cpu => {
            let sizes = Sizes { copy: 64 << 20, side: 768, rounds: 3, bf16: false };
            selftest::speed_in_host_memory::<Flex>(&Default::default(), sizes)
        }
        Device::Cuda(gpu) => accelerator.on_gpu().measure(gpu),
    }
}
