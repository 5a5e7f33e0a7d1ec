//! The task on the tracks that ship with the repository.

use std::path::{Path, PathBuf};

use burn::backend::Flex;
use coxswain_data::DataError;
use coxswain_nn::params::{FlatGrads, Trainables};
use coxswain_proto::{config::Tasks, ids::Step, run_spec::RunSpec};
use coxswain_task::{
    Batch, MicroLoss, Objective, Samples, StageClock, Task,
    memory::{Ask, Place},
};
use serde_json::{Value, json};

use super::{
    Separation,
    config::SCHEMA,
    data::{SegmentBatch, SegmentSample, Tracks},
    objective::SeparationObjective,
};

mod data;
mod golden;
mod stems;

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// A run on these tracks. `changes` are `section.key` and value.
fn read(data: &Path, changes: &[(&str, Value)]) -> Result<RunSpec, String> {
    let mut run = json!({
        "run": {"name": "test", "output_dir": "none"}, "task": {"type": "separation"},
        "network": {"n_fft": 64, "hop": 16, "bands": 6, "hidden_dim": 8, "layers": 2, "heads": 2},
        "data": {
            "path": data, "stems": ["plucks", "drums"], "sample_rate": 4000, "segment_seconds": 0.25,
            "holdout_every": 4,
        },
        "train": {"steps": 1, "global_batch": 4, "micro_batch": 4},
    });
    for (path, value) in changes {
        let (section, key) = path.split_once('.').expect("a section and a key");
        run[section][key] = value.clone();
    }
    // JSON is YAML.
    RunSpec::from_yaml(&run.to_string(), "test", &[], Tasks(&[SCHEMA])).map_err(|error| error.to_string())
}

fn spec(changes: &[(&str, Value)]) -> RunSpec {
    read(&repository().join("configs/assets/plucks"), changes).unwrap_or_else(|error| panic!("{error}"))
}

struct UntrainedSeparator {
    samples: Tracks,
    objective: SeparationObjective,
    trainables: Trainables<Flex>,
}

impl UntrainedSeparator {
    fn new(changes: &[(&str, Value)]) -> Self {
        let spec = spec(changes);
        let (objective, layout) = SeparationObjective::new(&spec).expect("its own settings");
        let initial = layout.initial_values(spec.run.seed);
        let trainables = Trainables::new(layout, initial, &Default::default());
        Self { samples: Tracks::from_spec(&spec).expect("they ship"), objective, trainables }
    }

    fn batch(&self, indices: &[u64]) -> Box<dyn Batch> {
        let read: Vec<_> = indices.iter().map(|&index| self.samples.read(index).expect("sound")).collect();
        (&self.samples as &dyn Samples).batch(Step(3), &read)
    }

    fn run(&self, indices: &[u64]) -> (MicroLoss, Vec<f32>) {
        let mut grads = FlatGrads::new(self.trainables.layout().len());
        let (batch, mut clock) = (self.batch(indices), StageClock::default());
        let loss = self.objective.forward_backward(&self.trainables, &*batch, &mut grads, &mut clock);
        (loss.expect("a sound batch"), grads.values_mut().clone())
    }
}

fn relative_error(ours: &[f32], theirs: &[f32]) -> f64 {
    assert_eq!(ours.len(), theirs.len());
    let square = |x: f32| f64::from(x) * f64::from(x);
    let off: f64 = ours.iter().zip(theirs).map(|(a, b)| square(a - b)).sum();
    (off / theirs.iter().map(|x| square(*x)).sum::<f64>()).sqrt()
}

#[test]
fn every_key_says_whether_it_decides_what_is_learned_and_is_in_the_guide() {
    assert_eq!(SCHEMA.misfits(), Vec::<String>::new());
    let guide = repository().join("docs/guide/separation.md");
    let guide = std::fs::read_to_string(guide).expect("a page of the book");
    let missing: Vec<_> =
        SCHEMA.known_keys().into_iter().filter(|key| !guide.contains(&format!("`{key}`"))).collect();
    assert!(missing.is_empty(), "{missing:?}");
}

#[test]
fn recompute_changes_no_bit_of_loss_or_gradient() {
    for dtype in ["float32", "bfloat16"] {
        let of = |mode: Value| {
            let rounded = ("network.activations_dtype", json!(dtype));
            UntrainedSeparator::new(&[("train.recompute", mode), rounded]).run(&[0, 1, 5])
        };
        let unchecked = of(json!("none"));
        assert!(unchecked.0.loss_sum > 0.0 && unchecked.1.iter().all(|gradient| gradient.is_finite()));
        for mode in [json!("selective"), json!("full"), json!({"every": 2})] {
            assert!(of(mode.clone()) == unchecked, "{mode} with {dtype}");
        }
    }
}

#[test]
fn a_batch_in_parts_has_the_same_loss_and_gradients_up_to_rounding() {
    let fixture = UntrainedSeparator::new(&[]);
    let (whole, gradients) = fixture.run(&[0, 1, 2, 3, 6]);
    let parts = [&[0, 1][..], &[2], &[3, 6]].map(|part| fixture.run(part));
    let sum = |of: fn(&MicroLoss) -> f64| parts.iter().map(|(loss, _)| of(loss)).sum::<f64>();
    assert_eq!(whole.valid, sum(|loss| loss.valid));
    assert!((whole.loss_sum - sum(|loss| loss.loss_sum)).abs() < 1e-5 * whole.loss_sum);
    let mut added = vec![0.0; gradients.len()];
    for (_, part) in &parts {
        added.iter_mut().zip(part).for_each(|(sum, value)| *sum += value);
    }
    assert!(relative_error(&added, &gradients) < 1e-4);
    let batch = fixture.batch(&[4, 2]);
    let apart = fixture.samples.take_apart(&*batch);
    assert!(*(&fixture.samples as &dyn Samples).batch(Step(3), &apart) == *batch);
    let stems = |segment: &SegmentSample| segment.stems.as_ptr();
    let batch = batch.content::<SegmentBatch>();
    let shared = apart.iter().zip(&batch.segments).all(|(a, b)| stems(a.content()) == stems(b));
    assert!(shared, "what is read ahead is predicted to be there once");
}

#[test]
fn a_loss_without_gradients_and_measures_are_those_of_the_pass() {
    let fixture = UntrainedSeparator::new(&[]);
    let (indices, stems) = ([0, 3, 9], 2.0);
    let (loss, _) = fixture.run(&indices);
    let batch = fixture.batch(&indices);
    assert_eq!(fixture.objective.loss(&fixture.trainables, &*batch).expect("sound"), loss);
    let found = fixture.objective.evaluate(&fixture.trainables, &*batch, &fixture.samples).expect("sound");
    assert_eq!((found.count, found.sums.len()), (stems * loss.valid, 3));
    assert!((found.sums[0] - stems * loss.loss_sum).abs() < 1e-9);
    let parts = Objective::<Flex>::parts(&fixture.objective);
    assert_eq!(parts, ["sdr/plucks", "sdr/drums", "csdr/plucks", "csdr/drums"]);
    let [whole, chunks] = [0, 2].map(|at| found.parts[at].sum + found.parts[at + 1].sum);
    assert!((whole - found.sums[1]).abs() < 1e-9 && (chunks - found.sums[2]).abs() < 1e-9);
    // An untrained network separates nothing.
    assert!(found.sums[1] / found.count < 3.0, "{found:?}");
}

#[test]
fn what_is_held_grows_with_the_batch_the_length_and_the_width_and_shrinks_with_recompute() {
    let peak = |micro_batch, changes: &[(&str, Value)]| {
        let sizes = Separation.sizes(&spec(changes)).expect("its own settings");
        let ask = Ask { micro_batch, world: 2, rank: 0, place: Place::Host { threads: 1 } };
        sizes.predict(ask).peak()
    };
    let now = peak(4, &[]);
    assert!(peak(8, &[]) > now);
    assert!(peak(4, &[("data.segment_seconds", json!(0.5))]) > now);
    assert!(peak(4, &[("network.hidden_dim", json!(16))]) > now);
    assert!(peak(4, &[("network.bands", json!(12))]) > now);
    assert!(peak(4, &[("train.recompute", json!("full"))]) < now);
}
