//! A trainer that is made when the run is known: what to compute on may be the run file's to say.

use coxswain_data::place;
use coxswain_proto::{
    ids::Step,
    run_spec::{DeviceChoice, RunSpec},
};
use coxswain_task::Task;

use super::{Device, Tasks, choose};
use crate::{
    collective::RingListener,
    link::{Link, Phase},
    memory::prediction::recorded::RecordedRuns,
    train::{TaskTrainer, TrainerOptions},
    trainer::{DataSetFacts, FailureKind, Trainer, TrainerFailure, TrainerOutcome},
};

/// Trains on what the run file, a flag or a variable says.
pub struct ChosenTrainer {
    tasks: Tasks,
    wanted: Option<DeviceChoice>,
    local_rank: usize,
    listener: Option<RingListener>,
    device: Device,
    inner: Option<Box<dyn Trainer>>,
}

impl ChosenTrainer {
    /// The trainer of the `local_rank`-th worker on this machine. `wanted` wins over the run file; `listener`
    /// accepts the ring's neighbour, none for a world of one.
    pub fn new(
        tasks: Tasks,
        wanted: Option<DeviceChoice>,
        local_rank: usize,
        listener: Option<RingListener>,
    ) -> Self {
        Self { tasks, wanted, local_rank, listener, device: Device::Cpu, inner: None }
    }

    fn inner(&mut self, spec: &RunSpec) -> Result<&mut Box<dyn Trainer>, TrainerFailure> {
        if self.inner.is_none() {
            place::keep(&spec.data.bucket_cache);
            let wanted = self.wanted.unwrap_or(spec.launch.device);
            let device = choose(wanted, self.local_rank, self.tasks.accelerator)
                .map_err(|missing| refused(format!("launch.device {wanted}: {missing}")))?;
            tracing::info!(%device, "using this device");
            self.device = device;
            let task = self.tasks.of(spec).map_err(|unknown| refused(unknown.to_string()))?;
            if let Some(refusal) = refusal(task, spec, device) {
                return Err(refused(refusal));
            }
            let listener = self.listener.take();
            self.inner = Some(match device {
                Device::Cpu => {
                    let options = TrainerOptions { device: Default::default(), listener };
                    let trainer = TaskTrainer::new(task, options).remembering(RecordedRuns::home());
                    match wanted {
                        DeviceChoice::Auto => Box::new(trainer.for_want_of_gpu()),
                        DeviceChoice::Cpu | DeviceChoice::Cuda => Box::new(trainer),
                    }
                }
                Device::Cuda(gpu) => {
                    let on_gpu = self.tasks.accelerator.on_gpu();
                    let trainer = on_gpu.trainer(&spec.task.kind, gpu, listener);
                    trainer.map_err(|unknown| refused(unknown.to_string()))?
                }
            });
        }
        Ok(self.inner.as_mut().expect("made above"))
    }
}

/// Why a run does not begin on this device, if it needs what that lacks: products in float16 on a CPU, an
/// update rule without a GPU's.
pub fn refusal(task: &dyn Task, spec: &RunSpec, device: Device) -> Option<String> {
    match device {
        Device::Cpu => task.float16(spec).map(|float16| float16.refused_on_cpu()),
        Device::Cuda(_) => spec.optimizer.name.refused_on_gpu().map(Into::into),
    }
}

/// Nothing has begun yet.
fn refused(message: String) -> TrainerFailure {
    TrainerFailure::new(FailureKind::BadInput, Phase::Loading, Step(0), message)
}

impl Trainer for ChosenTrainer {
    fn open(&mut self, spec: &RunSpec) -> Result<DataSetFacts, TrainerFailure> {
        self.inner(spec)?.open(spec)
    }

    fn device(&self) -> Device {
        self.device
    }

    fn train(&mut self, spec: &RunSpec, link: Box<dyn Link + Send>) -> TrainerOutcome {
        match self.inner(spec) {
            Ok(inner) => inner.train(spec, link),
            Err(failure) => TrainerOutcome::Failed(failure),
        }
    }
}
