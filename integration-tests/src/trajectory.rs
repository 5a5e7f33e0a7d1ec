//! The task `trajectory` against PyTorch, on the fixtures of `fixtures/make_trajectory_fixtures.py`:
//! trajectories of Transformers' vision tower, losses and gradients of each network, LoRA's against PEFT's.

use coxswain_models::Shelves;
use std::fs;

use coxswain_nn::{
    kernels::{Tape, flat::Flat, flat::FlatOn},
    params::{FlatGrads, Trainables},
};
use coxswain_proto::{ids::Step, run_spec::RunSpec};
use coxswain_task::{Assembly, Batch, Objective, Samples, StageClock, Task, TaskOn};
use coxswain_tasks::trajectory::Trajectory;
use safetensors::SafeTensors;
use serde_json::json;

use crate::{fixture, relative_error, repository};

/// Networks that train themselves, and one with adapters.
pub const CASES: [&str; 4] = ["autoencoder", "vae", "transformer", "lora"];

fn spec(case: &str, recompute: &str) -> RunSpec {
    let kind = if case == "lora" { "autoencoder" } else { case };
    let assets = repository().join("configs/assets");
    let mut run = json!({
        "run": {"name": "golden", "output_dir": "none", "seed": 7}, "task": {"type": "trajectory"},
        "extractor": {"path": assets.join("tiny-vla"), "layers": [0, 2], "spatial_resolution": 3},
        "network": {"type": kind, "hidden_dim": 12, "latent_dim": 5, "num_layers": 2, "heads": 2, "beta": 0.01},
        "data": {"path": assets.join("pictures"), "domains": ["shapes", "sketches"], "image_size": 112},
        "train": {"steps": 1, "global_batch": 2, "micro_batch": 2, "recompute": recompute},
        "cache": {"mode": "exact"},
    });
    if case == "lora" {
        run["lora"] = json!({"rank": 3, "alpha": 6.0});
        run["train"]["init_from"] = json!("brought by the test");
    }
    // JSON is YAML.
    RunSpec::from_yaml(&run.to_string(), "golden", &[], coxswain_tasks::TASKS).unwrap()
}

/// Tensors of a fixture by name.
struct FixtureTensors(Vec<u8>);

impl FixtureTensors {
    fn read(name: &str) -> Self {
        Self(fs::read(fixture("trajectory").join(format!("{name}.safetensors"))).unwrap())
    }

    fn floats(&self, name: &str) -> Vec<f32> {
        let file = SafeTensors::deserialize(&self.0).unwrap();
        let view = file.tensor(name).unwrap_or_else(|error| panic!("{name}: {error}"));
        view.data().chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
    }

    fn wide(&self, name: &str) -> Vec<f64> {
        self.floats(name).into_iter().map(f64::from).collect()
    }
}

struct BuiltCase<B: Tape<Base = B>> {
    objective: Box<dyn Objective<B>>,
    trainables: Trainables<B>,
    samples: std::sync::Arc<dyn Samples>,
    batch: Box<dyn Batch>,
}

/// A case with the fixture's weights, and its first two pictures, one of each domain.
fn case<B: Tape<Base = B>>(case: &str, recompute: &str, device: &B::Device) -> BuiltCase<B> {
    let spec = spec(case, recompute);
    let samples = Trajectory::<B> { models: Shelves::default() }.open(&spec).unwrap();
    let Assembly { objective, layout, .. } =
        TaskOn::<B>::build(&Trajectory { models: Shelves::<B>::default() }, &spec, &*samples, device)
            .unwrap();
    let expected = FixtureTensors::read(case);
    let mut values = vec![0.0; layout.whole_len()];
    for param in layout.whole() {
        values[param.range()].copy_from_slice(&expected.floats(&format!("weight.{}", param.name)));
    }
    let read = [0, 1].map(|index| samples.read(index).unwrap());
    let batch = samples.batch(Step(3), &read);
    BuiltCase { objective, trainables: Trainables::new(layout, values, device), samples, batch }
}

/// Compares trajectories.
pub fn hold_trajectories<B: Tape<Base = B>>(device: &B::Device) {
    let BuiltCase { objective, trainables, batch, .. } = case::<B>("autoencoder", "none", device);
    let extractor = objective.extractor().unwrap();
    let ours = extractor.compute(&trainables, &*batch).unwrap().values;
    let ours: Vec<f64> = ours.into_iter().map(f64::from).collect();
    let off = relative_error(&ours, &FixtureTensors::read("trajectories").wide("trajectories"));
    assert!(off < 1e-4, "trajectories are off by {off:e}");
}

/// Compares one case under one recompute mode: losses to 1e-4, gradients to 1e-3.
pub fn hold<B: Tape<Base = B>>(name: &str, recompute: &str, device: &B::Device) {
    let BuiltCase { objective, trainables, samples, batch } = case::<B>(name, recompute, device);
    let (expected, layout) = (FixtureTensors::read(name), trainables.layout().clone());
    let mut grads = FlatGrads::<B::Flat>::at(&B::Flat::place(device), layout.len());
    let mut clock = StageClock::default();
    let loss = objective.forward_backward(&trainables, &*batch, &mut grads, &mut clock).unwrap();
    let again = objective.loss(&trainables, &*batch).unwrap();
    assert!((again.loss_sum - loss.loss_sum).abs() < 1e-5 * loss.loss_sum, "{again:?} is not {loss:?}");
    let near = |what: &str, ours: f64| {
        let off = relative_error(&[ours], &expected.wide(what));
        assert!(off < 1e-4, "{name}: {what} is off by {off:e}");
    };
    near("loss", loss.loss_sum / loss.valid);
    let (_, figures) = clock.into_parts();
    figures.iter().for_each(|figure| near(&figure.name, figure.value));
    if name == "vae" {
        assert_eq!(figures.iter().count(), 2, "squared error and divergence");
    } else {
        let found = objective.evaluate(&trainables, &*batch, &*samples).unwrap();
        near("mse", found.sums[0] / found.count);
    }
    let sums = grads.values_mut().read(0..layout.len());
    for param in layout.params() {
        let ours: Vec<f64> = sums[param.range()].iter().map(|sum| f64::from(*sum) / loss.valid).collect();
        let off = relative_error(&ours, &expected.wide(&format!("grad.{}", param.name)));
        assert!(off < 1e-3, "{name}, recompute {recompute}: {} is off by {off:e}", param.name);
    }
}
