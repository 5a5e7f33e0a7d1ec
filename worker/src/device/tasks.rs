//! What this program can train, and on what.

use burn::backend::Flex;
use coxswain_proto::{ids::Step, run_spec::RunSpec};
use coxswain_task::{ForwardJob, TaskError, TaskOn};

use super::{Accelerator, Device};
use crate::{
    selftest::{self, Finding, Sizes},
    train::{self, HeldOutError, TrainError, UnknownTask},
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
            Device::Cuda(gpu) => self.accelerator.forward(job, gpu),
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
            Device::Cuda(gpu) => self.accelerator.evaluate(spec, gpu),
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
        Device::Cuda(gpu) => accelerator.measure(gpu),
    }
}
