//! The average of the weights in their place, and back.

use std::{path::Path, process::Command};

use burn::backend::Flex;
use coxswain_nn::kernels::flat::Flat;
use coxswain_proto::{ids::Step, run_spec::RunSpec};
use coxswain_tasks::vla_flow::VlaFlow;

use crate::{
    link::SoloLink,
    memory,
    train::{TaskTrainer, TrainError, TrainerOptions, workbench::Workbench},
};

/// Set where a test runs in a process of its own.
const ALONE: &str = "COX_TEST_ALONE";

fn spec(dir: &Path) -> RunSpec {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut spec = RunSpec::load(&root.join("configs/quickstart.yaml"), &[], coxswain_tasks::TASKS).unwrap();
    let absolute = |path: &str| root.join(path).display().to_string();
    spec.data.path = absolute(&spec.data.path);
    spec.optimizer.ema_decay = Some(0.9);
    spec.run.output_dir = dir.display().to_string();
    let mut settings: coxswain_tasks::vla_flow::config::VlaSettings = spec.settings().unwrap();
    settings.model.path = absolute(&settings.model.path);
    spec.set_settings(&settings);
    spec
}

/// A rank that is alone, with an average of the weights that is not the weights; and both.
fn averaging(spec: &RunSpec) -> (Workbench<'_, Flex>, [Vec<f32>; 2]) {
    let options = TrainerOptions { device: Default::default(), listener: None };
    let mut trainer = TaskTrainer::<Flex>::new(coxswain_tasks::leaked(VlaFlow::<Flex>::default()), options);
    let mut bench = trainer.prepare(spec, Box::new(SoloLink::new(Step(0)))).unwrap().bench;
    let mut optimizer = bench.learner.empty_optimizer(spec, &bench.members);
    let weights = bench.learner.trainables.to_vec();
    optimizer.begin(0, 0, &weights);
    let average: Vec<f32> = weights.iter().map(|weight| weight + 0.5).collect();
    optimizer.begin_average(&average);
    bench.learner.hold(optimizer, &bench.members);
    (bench, [weights, average])
}

fn values(bench: &Workbench<'_, Flex>) -> Vec<f32> {
    bench.learner.trainables.to_vec()
}

#[test]
fn whatever_becomes_of_the_work_weights_and_average_are_in_their_places_again() {
    let dir = tempfile::tempdir().unwrap();
    let spec = spec(dir.path());
    let (mut bench, [weights, average]) = averaging(&spec);
    let seen = bench.with_average(|bench| Ok(values(bench))).unwrap();
    assert!(seen == Some(average.clone()) && values(&bench) == weights);
    let failed = bench.with_average(|bench| {
        assert!(values(bench) == average);
        Err::<(), _>(TrainError::Device { step: Step(3), detail: "a fault".into() })
    });
    assert!(matches!(failed, Err(TrainError::Device { step: Step(3), .. })), "{failed:?}");
    assert!(values(&bench) == weights);
    let kept = bench.learner.optimizer().average().unwrap().1;
    assert!(kept.read(0..kept.len()) == average);
}

/// What is heard of refusals belongs to the process: this test is one.
#[test]
fn weights_that_a_device_had_no_memory_for_are_not_gone_on_with() {
    if std::env::var_os(ALONE).is_none() {
        let name = "train::tests::average::weights_that_a_device_had_no_memory_for_are_not_gone_on_with";
        let mut alone = Command::new(std::env::current_exe().unwrap());
        let ended = alone.args(["--exact", name]).env(ALONE, "1").output().unwrap();
        assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stdout));
        return;
    }
    memory::listen();
    let dir = tempfile::tempdir().unwrap();
    let spec = spec(dir.path());
    let (mut bench, _) = averaging(&spec);
    let refused = || std::thread::spawn(|| panic!("CUDA_ERROR_OUT_OF_MEMORY")).join().unwrap_err();
    // As the average is put in place: nothing is to be looked at, or written, with such weights.
    refused();
    let outcome = bench.with_average(|_| -> Result<(), _> { panic!("there is nothing to look at") });
    assert!(matches!(outcome, Err(TrainError::Device { .. })), "{outcome:?}");
    // As the weights come back.
    let outcome = bench.with_average(|_| {
        refused();
        Ok(())
    });
    assert!(matches!(outcome, Err(TrainError::Device { .. })), "{outcome:?}");
    assert_eq!(bench.with_average(|_| Ok(7)).unwrap(), Some(7));
}
