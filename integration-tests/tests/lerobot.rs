//! Twenty steps of training with LeRobot's draws, each a pass from file to file: its loss is LeRobot's, whose
//! optimizer, clipping and schedule are a policy's own preset (`steps` of `fixtures/lerobot_case.py`).

use std::{
    collections::{BTreeMap, HashMap},
    fs,
    path::{Path, PathBuf},
};

use burn_flex::Flex;
use coxswain_integration_tests::fixture;
use coxswain_models::{families::shelf, pretrained::checkpoint::CheckpointDir};
use coxswain_nn::{
    dtypes::FrozenDtype,
    files::{floats, read_tensors},
    params::TrainableLayout,
};
use coxswain_policies::{
    PassJob, PolicyFiles, PolicyKind, TuningSettings, directory::PolicyDirectory, run_pass,
};
use coxswain_proto::{
    ids::Rank,
    run_spec::{Optimizer, PerGroup},
};
use coxswain_worker::{
    collective::Solo,
    zero::{LearningRateSchedule, Rates, ShardedOptimizer, StepInput},
};
use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use serde_json::{Value, json};

const STEPS: usize = 20;
const TOLERANCE: f64 = 1e-4;

/// Tensors by name, with their shapes.
type Tensors = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

/// A golden policy that LeRobot has trained.
struct TrainedPolicy {
    /// The golden case.
    at: PathBuf,
    backbone: PathBuf,
    /// What is given of the steps, and their losses.
    steps: Tensors,
    /// Tasks, and the numbers of LeRobot's optimizer.
    about: Value,
}

/// A file of a golden case, images in 0..1; and what is said about it.
fn golden(path: &Path) -> (Tensors, Value) {
    let bytes = fs::read(path).expect("part of the repository");
    let (_, header) = SafeTensors::read_metadata(&bytes).expect("safetensors");
    let about = &header.metadata().as_ref().expect("it has some")["about"];
    let about: Value = serde_json::from_str(about).expect("JSON");
    let file = SafeTensors::deserialize(&bytes).expect("safetensors");
    let tensors = file.tensors().into_iter().map(|(name, view)| {
        let is_image = name.starts_with("observation.images") && !name.ends_with("mask");
        let most = if is_image { 255.0 } else { 1.0 };
        let bytes = || view.data().iter().map(|byte| f32::from(*byte) / most).collect();
        (name, (view.shape().to_vec(), floats(&view).unwrap_or_else(bytes)))
    });
    (tensors.collect(), about)
}

fn write(path: &Path, tensors: &Tensors, tasks: &str) {
    let bytes = |values: &[f32]| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<_>>();
    let all: Vec<_> = tensors.iter().map(|(name, (shape, values))| (name, shape, bytes(values))).collect();
    let views = all.iter().map(|(name, shape, bytes)| {
        (name.as_str(), TensorView::new(Dtype::F32, (*shape).clone(), bytes).expect("its shape"))
    });
    let metadata = HashMap::from([("tasks".to_owned(), tasks.to_owned())]);
    safetensors::serialize_to_file(views, Some(metadata), path).expect("written");
}

fn tensors(path: &Path) -> Tensors {
    let all = read_tensors(path).expect("there").into_iter();
    all.map(|tensor| (tensor.name, (tensor.shape, tensor.values))).collect()
}

impl TrainedPolicy {
    fn new(name: &str, backbone: &str) -> Self {
        let at = fixture("golden").join(name);
        let (steps, about) = golden(&at.join("steps.safetensors"));
        Self { backbone: at.join(backbone), at, steps, about }
    }

    /// LeRobot cuts its warm-up of 1,000 of 30,000 steps down to none of twenty.
    fn optimizer(&self, rate: f64) -> Optimizer {
        let of = |value: &Value| value.as_f64().expect("a number");
        let about = &self.about;
        Optimizer {
            betas: [of(&about["betas"][0]), of(&about["betas"][1])],
            eps: 1e-8,
            weight_decay: PerGroup::All(of(&about["weight_decay"])),
            clip_norm: PerGroup::All(of(&about["clip_norm"])),
            min_lr_ratio: of(&about["last_rate"]) / rate,
            ..Optimizer::default()
        }
    }

    /// The policy's directory, copied into this one.
    fn copied(&self, dir: &Path) -> PolicyDirectory {
        for file in fs::read_dir(self.at.join("policy")).expect("there") {
            let file = file.expect("listed").path();
            fs::copy(&file, dir.join(file.file_name().expect("a file"))).expect("copied");
        }
        let mut directory = PolicyDirectory::from_dir(dir).expect("it is read");
        if directory.json.get("base_model_path").is_some() {
            directory.json["base_model_path"] = json!(self.at.join("base"));
        }
        directory
    }

    /// What a pass is given of each step.
    fn given(&self) -> Vec<Tensors> {
        let (golden, _) = golden(&self.at.join("expected.safetensors"));
        let is_given = |name: &String| name.starts_with("observation.") || name == "action_is_pad";
        let same: Tensors = golden.into_iter().filter(|(name, _)| is_given(name)).collect();
        let of_step = |step: usize| {
            let mut given = same.clone();
            for (name, (shape, values)) in self.steps.iter().filter(|(name, _)| !name.starts_with("losses")) {
                let each = values.len() / STEPS;
                given.insert(name.clone(), (shape[1..].to_vec(), values[step * each..][..each].to_vec()));
            }
            given
        };
        (0..STEPS).map(of_step).collect()
    }

    /// Losses of the steps with this peak of the rate.
    fn losses(&self, rate: f64) -> Vec<f64> {
        let scratch = tempfile::tempdir().expect("a directory for the test");
        let [inputs, out] = ["in.safetensors", "out.safetensors"].map(|name| scratch.path().join(name));
        let dir = tempfile::tempdir().expect("a directory for the test");
        let (directory, backbone, device) = (&self.copied(dir.path()), &self.backbone, Default::default());
        let files = PolicyFiles { directory, backbone, dtype: FrozenDtype::Float32 };
        let kind = PolicyKind::from_directory(directory).expect("it is read");
        let outline = kind.outline(directory, backbone, shelf::<Flex>()).expect("it is read");
        let tuned = kind.tuned(directory, &outline, TuningSettings::default()).expect("the default");
        let mut layout = TrainableLayout::default();
        kind.load(files, &tuned, shelf::<Flex>(), &mut layout, &device).expect("it is read");
        let checkpoint = CheckpointDir { path: &directory.dir, rules: kind.rules() };
        let values = tuned.initial_values::<Flex>(3, &layout, checkpoint, files.dtype);
        let (mut values, mut losses) = (values.expect("they are there"), Vec::new());
        let (preset, tasks) = (self.optimizer(rate), self.about["tasks"].to_string());
        let schedule = LearningRateSchedule::new(&preset, Rates::from([("expert", rate)]), STEPS as u64);
        let mut optimizer = ShardedOptimizer::new(&layout, 1, Rank(0), &preset);
        for (step, given) in self.given().iter().enumerate() {
            write(&inputs, given, &tasks);
            let job = PassJob { files, inputs: &inputs, out: &out, gradients: true };
            run_pass::<Flex>(job, shelf(), &device).expect("it runs");
            let found = tensors(&out);
            losses.push(f64::from(found["loss"].1[0]));
            let mut grads = vec![0.0; layout.len()];
            for param in layout.params() {
                grads[param.range()].copy_from_slice(&found[&format!("grad.{}", param.name)].1);
            }
            let input = StepInput { scale: 1.0, rates: schedule.rates(step as u64), resting: None };
            let stepped = optimizer.step(&mut grads, &mut values, &input, &mut Solo::default());
            stepped.expect("a world of one");
            let weights = dir.path().join("model.safetensors");
            let mut all = tensors(&weights);
            for (name, (_, weights)) in &mut all {
                let trained = layout.find(&(kind.rules().canonical)(name));
                if let Some(id) = trained {
                    weights.copy_from_slice(&values[layout.get(id).range()]);
                }
            }
            write(&weights, &all, &tasks);
        }
        losses
    }

    fn hold(&self) {
        let untrained = &self.steps["losses.untrained"].1;
        for (name, rate) in self.about["rates"].as_object().expect("rates by name") {
            let reference = &self.steps[&format!("losses.{name}")].1;
            let found = self.losses(rate.as_f64().expect("a number"));
            let case = self.at.file_name().expect("a folder").display();
            for (step, (found, there)) in found.into_iter().zip(reference).enumerate() {
                let off = (found / f64::from(*there) - 1.0).abs();
                println!("{case} {name} {step}: {found:.6}, off by {off:.1e}");
                assert!(off <= TOLERANCE, "{name}, step {step}: {found}, and {there} in LeRobot");
            }
            // The losses say more than what the policy was before.
            let moved = reference.iter().zip(untrained).filter(|(a, b)| (**a / **b - 1.0).abs() > 1e-3);
            assert!(name != "faster" || moved.count() > STEPS / 2, "{reference:?} {untrained:?}");
        }
    }
}

#[test]
fn twenty_steps_of_smolvla_have_lerobots_losses() {
    TrainedPolicy::new("smolvla", "vlm").hold();
}

#[test]
fn twenty_steps_of_pi0_and_pi05_have_lerobots_losses() {
    TrainedPolicy::new("pi0", "../pi05/paligemma").hold();
    TrainedPolicy::new("pi05", "paligemma").hold();
}

#[test]
fn twenty_steps_of_gr00t_have_lerobots_losses() {
    TrainedPolicy::new("gr00t-widowx", "backbone").hold();
}
