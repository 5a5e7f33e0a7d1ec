//! A run from a policy directory of LeRobot's to another one, on recorded data.

use std::path::Path;

use burn::backend::Flex;
use coxswain_nn::params::{FlatGrads, Trainables};
use coxswain_policies::directory::PolicyDirectory;
use coxswain_proto::{ids::Step, run_spec::RunSpec};
use coxswain_task::{
    Built, StageClock, Task, TaskOn,
    memory::{Ask, Place},
};
use serde_json::{Value, json};

use crate::vla_flow::{
    VlaFlow,
    data::{Dataset, MicroBatch, collate},
};

const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../integration-tests/fixtures/golden/smolvla");
const DATA: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../configs/assets/metaworld-mini");

fn spec(policy: &Path, changes: &[(&str, Value)]) -> RunSpec {
    let mut spec = json!({
        "run": {"name": "test", "output_dir": "unused", "seed": 11},
        "model": {"path": policy, "backbone": format!("{GOLDEN}/vlm")},
        "data": {"path": DATA, "cameras": ["observation.images.corner2"], "horizon": 5},
        "train": {"steps": 1, "global_batch": 3, "micro_batch": 3},
        "cache": {},
        "memory": {},
    });
    for (path, value) in changes {
        let mut place = &mut spec;
        for key in path.split('.') {
            place = &mut place[key];
        }
        *place = value.clone();
    }
    serde_json::from_value(spec).expect("a run of this task")
}

fn golden() -> RunSpec {
    spec(&Path::new(GOLDEN).join("policy"), &[])
}

fn built(spec: &RunSpec) -> Result<(Built<Flex>, MicroBatch), String> {
    let task = VlaFlow::<Flex>::default();
    let samples = task.open(spec).map_err(|error| error.to_string())?;
    let built = task.build(spec, &*samples, &Default::default()).map_err(|error| error.to_string())?;
    let dataset = samples.downcast_ref::<Dataset>().expect("one set");
    let rows: Vec<_> = [3, 70, 150].iter().map(|index| dataset.sample(*index).expect("it is read")).collect();
    Ok((built, collate(Step(1), &rows, dataset.pad_token())))
}

#[test]
fn a_run_learns_and_leaves_a_policy_that_another_run_starts_from() {
    let (Built { objective, layout, mut initial }, batch) = built(&golden()).expect("it is built");
    let mut trainables = Trainables::<Flex>::new(layout.clone(), initial.clone(), &Default::default());
    let mut grads = FlatGrads::new(layout.len());
    let mut losses = Vec::new();
    for _ in 0..8 {
        grads.zero();
        let loss = objective
            .forward_backward(&trainables, &batch, &mut grads, &mut StageClock::default())
            .expect("it fits");
        assert_eq!(loss.valid, 3.0 * 5.0 * 4.0);
        let without = objective.loss(&trainables, &batch).expect("it fits");
        assert!((loss.loss_sum - without.loss_sum).abs() < 1e-4 * loss.loss_sum, "{loss:?} {without:?}");
        losses.push(loss.loss_sum / loss.valid);
        let step = 0.05 / loss.valid as f32;
        initial.iter_mut().zip(grads.values_mut().iter()).for_each(|(value, slope)| *value -= step * slope);
        trainables.set(initial.clone());
    }
    assert!(losses[7] < 0.9 * losses[0], "{losses:?}");

    let dir = tempfile::tempdir().expect("a directory for the test");
    let written = objective.export(dir.path(), &layout, &initial).expect("it is written");
    assert!(written.iter().all(|artifact| dir.path().join(artifact.path).is_file()));
    let out = dir.path().join("policy");
    let directory = PolicyDirectory::open(&out).expect("it is read");
    let cameras = directory.features("input_features").expect("there");
    let names: Vec<_> = cameras.iter().map(|feature| (&feature.name[..], &feature.shape[..])).collect();
    assert_eq!(names, [("observation.state", &[4][..]), ("observation.images.corner2", &[3, 96, 96])]);
    let of = directory.statistics("policy_preprocessor.json", "normalizer_processor").expect("there");
    assert_eq!((of["action"].mean.len(), of["observation.state"].std.len()), (4, 4));
    let (again, batch) = built(&spec(&out, &[])).expect("it is built");
    let rounded = again.initial.iter().zip(&initial).all(|(a, b)| (a - b).abs() <= b.abs() / 256.0);
    assert!(rounded, "values are those that were trained, as bfloat16");
    let trainables = Trainables::<Flex>::new(again.layout, again.initial, &Default::default());
    let loss = again.objective.loss(&trainables, &batch).expect("it fits");
    assert!((loss.loss_sum / loss.valid - losses[7]).abs() < 0.2 * losses[7], "{loss:?} after {losses:?}");
}

#[test]
fn what_such_a_run_will_take_is_known_before() {
    let task = VlaFlow::<Flex>::default();
    let subject = task.sizes(&golden()).expect("it is read");
    let ask = |micro_batch| Ask { micro_batch, world: 1, rank: 0, place: Place::Host { threads: 1 } };
    let [one, four] = [1, 4].map(|samples| subject.predict(ask(samples)));
    assert!(four.kept > one.kept && one.kept > 0);
    assert!(subject.describe()[0].1.contains("6,384 trained"), "{:?}", subject.describe());
}

#[test]
fn settings_that_such_a_policy_has_not_are_refused_by_key() {
    for (key, value) in [
        ("lora", json!({"rank": 2, "targets": ["q_proj"]})),
        ("data.horizon", json!(4)),
        ("data.normalization", json!({"action": "min_max"})),
        ("cache.mode", json!("exact")),
        ("model.train", json!(["o_proj"])),
        ("model.weights_dtype", json!("nf4")),
        ("data.delta_actions", json!([true])),
        ("data.action_stride", json!(2)),
        ("data.resize", json!("letterbox 224")),
        ("expert", json!({"sampling_steps": 4})),
    ] {
        let spec = spec(&Path::new(GOLDEN).join("policy"), &[(key, value)]);
        let message = built(&spec).err().expect(key);
        assert!(message.contains(key), "{key}: {message}");
    }
    let elsewhere = spec(&Path::new(GOLDEN).join("policy"), &[("model.backbone", json!("/nowhere"))]);
    let message = built(&elsewhere).err().expect("it is not there");
    assert!(message.contains("no config.json") && message.contains("hf download"), "{message}");
}
