//! Choices on machines with and without GPUs.

use burn::backend::Flex;
use coxswain_proto::{
    ids::Step,
    run_spec::{DeviceChoice, RunSpec},
};
use coxswain_task::{
    ConvertJob, ForwardJob, GenerateJob, Losses, Reply, Responder, TaskError, TaskOn, Width,
};
use coxswain_tasks::vla_flow::VlaFlow;

use super::*;
use crate::{
    collective::{RingListener, TransportError, TransportSource},
    link::Link,
    selftest::Finding,
    train::{HeldOutError, TrainError, UnknownTask},
    trainer::{DataSetFacts, Trainer, TrainerFailure, TrainerOutcome},
};

const ABSENT: NoAccelerator = NoAccelerator { driver: || false };

/// A machine of so many GPUs, or of one obstacle.
struct Machine(Result<usize, NoGpus>);

impl Accelerator for Machine {
    fn probe(&self) -> Result<Gpus, NoGpus> {
        let version = Version { major: 13, minor: 0 };
        let gpus = |count| Gpus { count, driver: version, nvrtc: version, headers: "/cuda/include".into() };
        self.0.clone().map(gpus)
    }

    fn nccl(&self) -> Result<u32, TransportError> {
        ABSENT.nccl()
    }

    fn on_gpu(&self) -> &dyn OnGpu {
        self
    }
}

impl OnGpu for Machine {
    fn trainer(
        &self,
        task: &str,
        gpu: usize,
        listener: Option<RingListener>,
    ) -> Result<Box<dyn Trainer>, UnknownTask> {
        let _ = (task, gpu, listener);
        Ok(Box::new(Idle))
    }

    fn evaluate(
        &self,
        spec: &RunSpec,
        gpu: usize,
        ema: bool,
    ) -> Result<(Step, Option<HeldOutError>), TrainError> {
        ABSENT.on_gpu().evaluate(spec, gpu, ema)
    }

    fn responder(
        &self,
        spec: &RunSpec,
        dir: &std::path::Path,
        gpu: usize,
    ) -> Result<Option<Box<dyn Responder>>, TrainError> {
        ABSENT.on_gpu().responder(spec, dir, gpu)
    }

    fn forward(&self, job: &ForwardJob<'_>, gpu: usize) -> Option<Result<(), TaskError>> {
        ABSENT.on_gpu().forward(job, gpu)
    }

    fn generate(&self, job: &GenerateJob<'_>, gpu: usize) -> Result<Option<Vec<Reply>>, TrainError> {
        ABSENT.on_gpu().generate(job, gpu)
    }

    fn convert(
        &self,
        job: &ConvertJob<'_>,
        gpu: usize,
    ) -> Result<Option<Vec<Vec<std::path::PathBuf>>>, TrainError> {
        ABSENT.on_gpu().convert(job, gpu)
    }

    fn transport(&self, gpu: usize) -> Box<dyn TransportSource> {
        ABSENT.on_gpu().transport(gpu)
    }

    fn first(&self, gpu: usize) -> Vec<Finding> {
        ABSENT.on_gpu().first(gpu)
    }

    fn measure(&self, gpu: usize) -> Vec<Finding> {
        ABSENT.on_gpu().measure(gpu)
    }

    fn few_steps(&self, gpu: usize, width: Width) -> Vec<(&'static str, Losses)> {
        ABSENT.on_gpu().few_steps(gpu, width)
    }
}

/// Opens everything, and trains nothing.
struct Idle;

impl Trainer for Idle {
    fn open(&mut self, _spec: &RunSpec) -> Result<DataSetFacts, TrainerFailure> {
        Ok(DataSetFacts { training_samples: 1, fingerprint: String::new(), order_key: 0, sets: Vec::new() })
    }

    fn train(&mut self, _spec: &RunSpec, _link: Box<dyn Link + Send>) -> TrainerOutcome {
        TrainerOutcome::Done
    }
}

fn obstacles() -> Vec<NoGpus> {
    let version = |major| Version { major, minor: 0 };
    vec![
        NoGpus::NotBuilt { driver: false },
        NoGpus::NotBuilt { driver: true },
        NoGpus::NoDriver,
        NoGpus::Refused { call: "cuInit", code: 803 },
        NoGpus::NoGpu,
        NoGpus::NoCompiler,
        NoGpus::OldCompiler { found: version(11), needed: version(12) },
        NoGpus::NoHeaders { looked_at: "CUDA_PATH is not set".into() },
    ]
}

#[test]
fn the_local_rank_picks_a_gpu_and_ranks_beyond_the_gpus_share() {
    let four = Machine(Ok(4));
    for (rank, gpu) in [(0, 0), (3, 3), (4, 0), (9, 1)] {
        for wanted in [DeviceChoice::Cuda, DeviceChoice::Auto] {
            assert_eq!(choose(wanted, rank, &four), Ok(Device::Cuda(gpu)));
        }
        assert_eq!(choose(DeviceChoice::Cpu, rank, &four), Ok(Device::Cpu));
    }
}

#[test]
fn every_obstacle_refuses_cuda_with_a_remedy_and_sends_auto_to_the_cpu() {
    for obstacle in obstacles() {
        let machine = Machine(Err(obstacle.clone()));
        assert_eq!(choose(DeviceChoice::Auto, 0, &machine), Ok(Device::Cpu));
        assert_eq!(choose(DeviceChoice::Cpu, 0, &machine), Ok(Device::Cpu));
        let refused = choose(DeviceChoice::Cuda, 0, &machine).expect_err("there is no GPU");
        assert_eq!(refused, obstacle);
        let message = refused.to_string();
        let remedies = ["install", "check", "build", "newer"];
        assert!(remedies.iter().any(|remedy| message.contains(remedy)), "{message}");
    }
}

#[test]
fn a_trainer_says_what_it_computes_on_when_it_has_opened_a_run() {
    static FOUR: Machine = Machine(Ok(4));
    let spec = serde_json::from_value(serde_json::json!({
        "run": {"name": "t", "output_dir": "unused", "seed": 5},
        "model": {"path": "unused"},
        "data": {"path": "unused", "cameras": ["a"], "sensor": "b", "horizon": 8},
        "train": {"steps": 1, "global_batch": 4, "micro_batch": 2},
    }));
    let spec: RunSpec = spec.expect("a valid spec");
    let task: &dyn TaskOn<Flex> = coxswain_tasks::leaked(VlaFlow::<Flex>::default());
    let tasks = Tasks { cpu: vec![task].leak(), accelerator: &FOUR };
    let mut trainer = ChosenTrainer::new(tasks, Some(DeviceChoice::Cuda), 6, None);
    trainer.open(&spec).expect("an idle trainer opens everything");
    assert_eq!(trainer.device(), Device::Cuda(2));
}

#[test]
fn devices_and_versions_are_named_as_everywhere() {
    assert_eq!(Device::Cpu.to_string(), "cpu");
    assert_eq!(Device::Cuda(3).to_string(), "cuda:3");
    assert_eq!(Version { major: 12, minor: 8 }.to_string(), "12.8");
}

#[test]
fn a_build_without_gpus_says_whether_the_machine_has_a_driver_and_how_to_build_another() {
    for driver in [|| true, || false] {
        let missing = NoAccelerator { driver }.probe().expect_err("there are no GPUs in this build");
        assert_eq!(missing, NoGpus::NotBuilt { driver: driver() });
        assert!(missing.to_string().contains("cargo build --release --features cuda"), "{missing}");
    }
}
