//! A run from a policy directory of LeRobot's to another one, on recorded data.

use std::path::Path;

use burn::backend::Flex;
use coxswain_feature_store::Digest;
use coxswain_models::families::shelf;
use coxswain_nn::{
    kernels::sizes::Sizes,
    params::{FlatGrads, Trainables},
};
use coxswain_policies::directory::PolicyDirectory;
use coxswain_proto::{ids::Step, memory::Category, run_spec::RunSpec};
use coxswain_task::{
    Assembly, StageClock, Task, TaskOn,
    memory::{Ask, Place},
};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::vla_flow::{
    VlaFlow,
    base::PolicyBase,
    config::VlaSettings,
    data::{Dataset, MicroBatch, collate},
};

mod gr00t;
mod pi;

const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../integration-tests/fixtures/golden/smolvla");
const DATA: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../configs/assets/metaworld-mini");

const CAMERA: &str = "observation.images.corner2";

fn spec(policy: &Path, changes: &[(&str, Value)]) -> RunSpec {
    let mut spec = json!({
        "run": {"name": "test", "output_dir": "unused", "seed": 11},
        "model": {"path": policy, "backbone": format!("{GOLDEN}/vlm")},
        "data": {
            "path": DATA,
            "cameras": [CAMERA],
            "rename_map": {CAMERA: "observation.images.camera1"},
            "horizon": 5,
        },
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

fn built(spec: &RunSpec) -> Result<(Assembly<Flex>, MicroBatch), String> {
    let task = VlaFlow::<Flex>::default();
    let samples = task.open(spec).map_err(|error| error.to_string())?;
    let built = task.build(spec, &*samples, &Default::default()).map_err(|error| error.to_string())?;
    let dataset = samples.downcast_ref::<Dataset>().expect("one set");
    let rows: Vec<_> = [3, 70, 150].iter().map(|index| dataset.sample(*index).expect("it is read")).collect();
    Ok((built, collate(Step(1), &rows, dataset.pad_token())))
}

#[test]
fn a_run_learns_and_leaves_a_policy_that_another_run_starts_from() {
    let (built, batch) = built(&golden()).expect("it is built");
    let trainables =
        Trainables::<Flex>::new(built.layout.clone(), built.initial.clone(), &Default::default());
    let without = built.objective.loss(&trainables, &batch).expect("it fits");
    assert_eq!(without.valid, 3.0 * 5.0 * 4.0);
    let descended = descend(&built, &batch, 0.05, 8);
    let losses = &descended.0;
    let off = (losses[0] - without.loss_sum / without.valid).abs();
    assert!(off < 1e-4 * losses[0], "{losses:?} {without:?}");
    assert!(losses[7] < 0.9 * losses[0], "{losses:?}");

    let left = hold_left(&built, &descended, |policy| spec(policy, &[]));
    let out = left.path().join("policy");
    let directory = PolicyDirectory::from_dir(&out).expect("it is read");
    let features = directory.features("input_features").expect("there");
    let names: Vec<_> = features.iter().map(|feature| (&feature.name[..], &feature.shape[..])).collect();
    let expected: [(_, &[usize]); 4] = [
        ("observation.images.camera1", &[3, 96, 96]),
        ("observation.images.camera2", &[3, 20, 16]),
        ("observation.state", &[4]),
        ("observation.images.empty_camera_0", &[3, 480, 640]),
    ];
    assert_eq!(names, expected, "the policy's own, in the data set's sizes");
    let steps = directory.steps("policy_preprocessor.json").expect("there");
    assert_eq!(steps[0].config, json!({"rename_map": {CAMERA: "observation.images.camera1"}}));
    let of = directory.statistics("policy_preprocessor.json", "normalizer_processor").expect("there");
    assert_eq!((of["action"].mean.len(), of["observation.state"].std.len()), (4, 4));
}

/// A run leaves the policy to which it has descended; another run begins with it, but for bfloat16.
fn hold_left(
    built: &Assembly<Flex>,
    descended: &(Vec<f64>, Vec<f32>),
    again: impl Fn(&Path) -> RunSpec,
) -> TempDir {
    let (losses, trained) = descended;
    let dir = tempfile::tempdir().expect("a directory for the test");
    let written = built.objective.export(dir.path(), &built.layout, trained).expect("it is written");
    assert!(written.iter().all(|artifact| dir.path().join(artifact.path).is_file()));
    let (again, batch) = self::built(&again(&dir.path().join("policy"))).expect("it is built");
    let rounded = again.initial.iter().zip(trained).all(|(a, b)| (a - b).abs() <= b.abs() / 256.0);
    assert!(rounded, "values are those that were trained, as bfloat16");
    let trainables = Trainables::<Flex>::new(again.layout, again.initial, &Default::default());
    let loss = again.objective.loss(&trainables, &batch).expect("it fits");
    let last = losses[losses.len() - 1];
    assert!((loss.loss_sum / loss.valid - last).abs() < 0.2 * last, "{loss:?} after {losses:?}");
    dir
}

/// What a run will take grows with its samples, and its frozen weights are those that it has.
fn hold_prediction(spec: &RunSpec) -> (Assembly<Flex>, MicroBatch) {
    let subject = VlaFlow::<Flex>::default().sizes(spec).expect("it is read");
    let ask = |micro_batch| Ask { micro_batch, world: 1, rank: 0, place: Place::Host { threads: 1 } };
    let [one, four] = [1, 4].map(|samples| subject.predict(ask(samples)));
    assert!(four.kept > one.kept && one.kept > 0);
    let (built, batch) = built(spec).expect("it is built");
    let rows = built.objective.modules(&built.layout);
    let kept: u64 = rows.iter().filter(|row| !row.trains).map(|row| row.bytes).sum();
    assert_eq!(one.of(Category::FrozenWeights), kept);
    (built, batch)
}

#[test]
fn what_such_a_run_will_take_is_known_before() {
    let task = VlaFlow::<Flex>::default();
    let subject = task.sizes(&golden()).expect("it is read");
    let ask = |micro_batch| Ask { micro_batch, world: 1, rank: 0, place: Place::Host { threads: 1 } };
    let [one, four] = [1, 4].map(|samples| subject.predict(ask(samples)));
    assert!(four.kept > one.kept && one.kept > 0);
    assert!(subject.describe()[0].1.contains("6,384 trained"), "{:?}", subject.describe());
    let adapted = task.sizes(&with(&[("lora", expert_lora())])).expect("it is read");
    let trains = &adapted.describe()[1].1;
    assert!(trains.starts_with("lora ") && !trains.contains("expert"), "{trains}");
    assert!(adapted.predict(ask(4)).backward <= four.backward, "less has gradients");
    let [exact, deep] = [("cache.mode", json!("exact")), ("cache.tap", json!("final"))];
    let kept = [&[exact.clone()][..], &[exact, deep]];
    let [images, layers] = kept.map(|of| task.sizes(&with(of)).expect("it is read").predict(ask(4)));
    assert!(images.kept <= four.kept && images.of(Category::Cache) > 0);
    assert!(layers.of(Category::Cache) > images.of(Category::Cache), "of every layer");
    assert!(layers.flops.total() < images.flops.total() && images.flops.total() < four.flops.total());
    let offered = subject.suggestions(ask(4));
    let faster = [
        ("features of images cached", "cache.mode=exact"),
        ("keys and values cached", "cache.mode=exact cache.tap=final"),
    ]
    .map(|(what, setting)| {
        let found = offered.iter().find(|one| one.what == what).expect(what);
        assert!(found.setting == setting && found.remark.contains("on disk"), "{found:?}");
        let faster = found.remark.split("at most ").nth(1).and_then(|rest| rest.split(' ').next());
        faster.and_then(|faster| faster.parse::<f64>().ok()).expect("how much faster")
    });
    assert!(faster[1] > faster[0] && faster[0] > 1.0, "{faster:?}");
}

fn with(changes: &[(&str, Value)]) -> RunSpec {
    spec(&Path::new(GOLDEN).join("policy"), changes)
}

/// Adapters where LeRobot has them.
fn expert_lora() -> Value {
    json!({"rank": 2, "alpha": 4.0})
}

/// Some steps of plain gradient descent; the mean losses before each, and the values behind the last.
fn descend(built: &Assembly<Flex>, batch: &MicroBatch, rate: f64, steps: usize) -> (Vec<f64>, Vec<f32>) {
    let (mut values, mut losses) = (built.initial.clone(), Vec::new());
    let mut trainables = Trainables::<Flex>::new(built.layout.clone(), values.clone(), &Default::default());
    let mut grads = FlatGrads::new(built.layout.len());
    for _ in 0..steps {
        grads.zero();
        let clock = &mut StageClock::default();
        let loss = built.objective.forward_backward(&trainables, batch, &mut grads, clock).expect("it fits");
        losses.push(loss.loss_sum / loss.valid);
        let step = (rate / loss.valid) as f32;
        values.iter_mut().zip(grads.values_mut().iter()).for_each(|(value, slope)| *value -= step * slope);
        trainables.set(values.clone());
    }
    (losses, values)
}

#[test]
fn adapters_learn_alone_and_leave_peft_and_the_policy_that_has_them_merged() {
    let lora = json!({"rank": 2, "alpha": 4.0, "targets": ".*(text_model|lm_expert).*_proj"});
    let spec_of = |policy: &Path| {
        let train = json!([r"action_out_proj", r"text_model\.layers\.0\.input_layernorm"]);
        spec(policy, &[("lora", lora.clone()), ("model.train", train)])
    };
    let (built, batch) = built(&spec_of(&Path::new(GOLDEN).join("policy"))).expect("it is built");
    let groups: Vec<_> = built.layout.groups().iter().map(ToString::to_string).collect();
    assert_eq!(groups, ["lora", "base", "expert"]);
    let (losses, values) = descend(&built, &batch, 0.03, 10);
    assert!(losses[9] < 0.97 * losses[0], "{losses:?}");
    let rows = built.objective.modules(&built.layout);
    let of = |trains: bool| -> usize {
        rows.iter().filter(|row| row.trains == trains).map(|row| row.parameters).sum()
    };
    assert_eq!(of(true), built.layout.len());

    let dir = tempfile::tempdir().expect("a directory for the test");
    let written = built.objective.export(dir.path(), &built.layout, &values).expect("it is written");
    assert!(written.iter().all(|artifact| dir.path().join(artifact.path).is_file()), "{written:?}");
    let trainables = Trainables::<Flex>::new(built.layout.clone(), values, &Default::default());
    let trained = built.objective.loss(&trainables, &batch).expect("it fits");
    // The merged policy is the one that was trained, but for bfloat16.
    let (merged, batch) = self::built(&spec(&dir.path().join("policy"), &[])).expect("it is built");
    let of_merged = Trainables::<Flex>::new(merged.layout, merged.initial, &Default::default());
    let again = merged.objective.loss(&of_merged, &batch).expect("it fits");
    assert!((again.loss_sum / trained.loss_sum - 1.0).abs() < 0.02, "{again:?} {trained:?}");
    // The adapter is, to the bit, with what trained in full beside it.
    let mut continued = spec_of(&Path::new(GOLDEN).join("policy"));
    let path = dir.path().join("adapter");
    continued.set_settings(&VlaSettings {
        lora: VlaSettings::from_spec(&continued)
            .expect("its own")
            .lora
            .map(|lora| coxswain_nn::lora::Lora { init_from: Some(path.display().to_string()), ..lora }),
        ..VlaSettings::from_spec(&continued).expect("its own")
    });
    let (continued, batch) = self::built(&continued).expect("it is built");
    assert_eq!(continued.initial, trainables.to_vec());
    let of_continued = Trainables::<Flex>::new(continued.layout, continued.initial, &Default::default());
    assert_eq!(continued.objective.loss(&of_continued, &batch).expect("it fits"), trained);
}

/// What is kept of a sample is its own, and steps from it have the bits of live ones, which are returned.
fn hold_kept(cached: &RunSpec) -> (Assembly<Flex>, (Vec<f64>, Vec<f32>)) {
    let (built, batch) = built(cached).expect("it is built");
    let extractor = built.objective.extractor().expect("there is a cache");
    let initial = built.initial.clone();
    let trainables = Trainables::<Flex>::new(built.layout.clone(), initial, &Default::default());
    let features = extractor.compute(&trainables, &batch).expect("it fits");
    let rows = extractor.row_values(&batch);
    assert_eq!(rows.iter().sum::<usize>(), features.values.len());
    let first = &batch.input_ids[batch.valid[0].start as usize..batch.valid[0].end as usize];
    assert_eq!(extractor.shape().values(first, &batch.image_shapes[..1]), rows[0]);
    // Of each sample alone they are the same, whatever it is padded to.
    let samples = VlaFlow::<Flex>::default().open(cached).expect("it opens");
    let dataset = samples.downcast_ref::<Dataset>().expect("one set");
    let one = collate(Step(1), &[dataset.sample(70).expect("it is read")], dataset.pad_token());
    let alone = extractor.compute(&trainables, &one).expect("it fits");
    assert_eq!(alone.values, features.values[rows[0]..rows[0] + rows[1]]);
    let live = descend(&built, &batch, 0.01, 3);
    let kept = MicroBatch { features: Some(features), pixel_values: Vec::new(), ..batch };
    assert_eq!(descend(&built, &kept, 0.01, 3), live, "with what training drops");
    (built, live)
}

/// What such a run reads of the weights for what it keeps.
fn digest_of_kept(spec: &RunSpec) -> (String, Digest) {
    let (built, _) = built(spec).expect("it is built");
    let frozen = built.objective.extractor().expect("there is a cache").frozen().expect("it opens");
    (frozen.name(), frozen.digest().expect("it is read"))
}

#[test]
fn steps_from_kept_features_have_the_bits_of_live_ones() {
    let lora = json!({"rank": 2, "alpha": 4.0, "targets": ".*text_model.*(q|v)_proj"});
    let [exact, deep] = [("cache.mode", json!("exact")), ("cache.tap", json!("final"))];
    let cached = with(&[("lora", lora.clone()), exact.clone()]);
    hold_kept(&cached);
    let [images, layers] = [&[exact.clone()][..], &[exact.clone(), deep.clone()]].map(with);
    assert_eq!(digest_of_kept(&cached), digest_of_kept(&images), "the tower's alone");
    hold_kept(&layers);
    assert_ne!(digest_of_kept(&layers), digest_of_kept(&images), "the language model's, too");
    let message = built(&with(&[("lora", lora), exact, deep])).err().expect("a layer trains");
    assert!(message.contains("cache.mode") && message.contains("text_model"), "{message}");
    let narrow = with(&[
        ("cache.mode", json!("exact")),
        ("cache.tap", json!("final")),
        ("cache.dtype", json!("int8")),
    ]);
    assert!(built(&narrow).err().expect("one scale for all layers").contains("cache.dtype"));
}

#[test]
fn frozen_layers_of_few_bits_are_learned_above() {
    let lora = json!({"rank": 2, "alpha": 4.0, "targets": ".*(text_model|lm_expert).*_proj"});
    let of = |dtype: &str| {
        let spec = with(&[("lora", lora.clone()), ("model.weights_dtype", json!(dtype))]);
        let subject = VlaFlow::<Flex>::default().sizes(&spec).expect("it is read");
        let ask = Ask { micro_batch: 3, world: 1, rank: 0, place: Place::Host { threads: 1 } };
        let predicted = subject.predict(ask).of(Category::FrozenWeights);
        let (built, batch) = built(&spec).expect("it is built");
        let rows = built.objective.modules(&built.layout);
        let kept: u64 = rows.iter().filter(|row| !row.trains).map(|row| row.bytes).sum();
        assert_eq!(predicted, kept, "{dtype}");
        (descend(&built, &batch, 0.03, 8).0, kept)
    };
    let [dense, eight, four] = ["bfloat16", "int8", "nf4"].map(of);
    assert!(four.1 < eight.1 && eight.1 < dense.1, "bytes: {} {} {}", four.1, eight.1, dense.1);
    let far = |(losses, _): &(Vec<f64>, u64)| (losses[0] / dense.0[0] - 1.0).abs();
    // Four bits are rough for rows as short as these: 12 % of the first loss, and 2.5 % in the process test.
    assert!(
        0.0 < far(&eight) && far(&eight) < 0.02 && far(&eight) < far(&four),
        "{eight:?} {four:?} {dense:?}"
    );
    for (losses, _) in [&dense, &eight, &four] {
        assert!(losses[7] < losses[0], "{losses:?}");
    }
}

#[test]
fn settings_that_such_a_policy_has_not_are_refused_by_key() {
    for (key, value) in [
        ("lora.targets", json!(["q_proj"])),
        ("data.horizon", json!(4)),
        ("data.normalization", json!({"action": "min_max"})),
        ("cache.mode", json!("periodic")),
        ("model.train", json!(["vision_model"])),
        ("data.delta_actions", json!([true])),
        ("data.action_stride", json!(2)),
        ("data.resize", json!("letterbox 224")),
        ("expert", json!({"sampling_steps": 4})),
        ("data.rename_map", json!({"observation.images.gone": "observation.images.camera1"})),
    ] {
        let message = built(&with(&[("lora", expert_lora()), (key, value)])).err().expect(key);
        assert!(message.contains(key), "{key}: {message}");
    }
    let exact = ("cache.mode", json!("exact"));
    for (key, other) in [
        ("cache.tap", ("cache.tap", json!({"layer": 1}))),
        ("cache.mode", ("model.train", json!(["connector"]))),
    ] {
        let message = built(&with(&[exact.clone(), other])).err().expect(key);
        assert!(message.contains(key), "{key}: {message}");
    }
    let misfit = |cameras: &[&str], map: Value| {
        let changes = [("data.cameras", json!(cameras)), ("data.rename_map", map)];
        let spec = spec(&Path::new(GOLDEN).join("policy"), &changes);
        let base =
            PolicyBase::from_settings(&VlaSettings::from_spec(&spec).expect("sound"), shelf::<Sizes>());
        let base = base.expect("it is read").expect("a policy");
        base.misfit(&VlaSettings::from_spec(&spec).expect("sound"), &spec).map(|(_, problem)| problem)
    };
    let [one, two] = [1, 2].map(|number| format!("observation.images.camera{number}"));
    assert_eq!(misfit(&[&one, &two], json!({})), None);
    assert_eq!(misfit(&[&two], json!({})), None, "one that the robot has not");
    let wanted = |cameras: &[&str], map: Value, part: &str| {
        let message = misfit(cameras, map).expect(part);
        assert!(message.contains(part), "{message}");
    };
    wanted(&["a", "b"], json!({}), &format!("data.rename_map: {{a: {one}, b: {two}}}"));
    wanted(&["a", &one], json!({}), &format!("data.rename_map: {{a: {two}}}"));
    wanted(&["a", "b", "c"], json!({}), "but the policy has only");
    wanted(&[&two, &one], json!({}), &format!("list them as [{one}, {two}]"));
    wanted(&["a", &one], json!({"a": one}), "are mapped to the same camera");
    let elsewhere = spec(&Path::new(GOLDEN).join("policy"), &[("model.backbone", json!("/nowhere"))]);
    let message = built(&elsewhere).err().expect("it is not there");
    assert!(message.contains("no config.json") && message.contains("hf download"), "{message}");
}
