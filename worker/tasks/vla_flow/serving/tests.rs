//! Observations checked, and answered as evaluation would.

use std::path::Path;

use burn::backend::Flex;
use coxswain_models::qwen2_5_vl::synthetic::SyntheticCheckpoint;
use coxswain_nn::{
    dtypes::WeightsDtype,
    params::{TrainableLayout, Trainables},
};
use coxswain_proto::{ids::Step, run_spec::RunSpec};
use coxswain_task::{Array, Built, Named, Responder, Samples, TaskOn, Value};
use serde_json::json;
use tempfile::TempDir;

use super::PolicyResponder;
use crate::vla_flow::{
    VlaFlow,
    config::VlaSpec,
    data::{Dataset, PolicyFile},
    policy::Policy,
    testing::{
        assets,
        recording::{self, CHANNELS, Recording, WINDOW},
    },
};

/// Frames of the first episode.
const FRAMES: [usize; 3] = [0, 2, 4];

const LORA: &str = r".*(q_proj|down_proj|attn\.qkv)";
/// Modules that those adapters leave alone.
const WHOLE: [&str; 4] = [
    r"patch_embed\.proj",
    r"visual\.merger",
    r"layers\.2\.(input_layernorm|self_attn\.v_proj)",
    r"language_model\.norm",
];

/// What trains of the model: adapters, whole modules, both; adapters with magnitudes of their own, alone and
/// beside whole modules.
fn variants() -> [Run; 5] {
    let [adapters, magnitudes] = [false, true].map(|use_dora| Some(Adapters { targets: LORA, use_dora }));
    let (none, whole) = (&[][..], &WHOLE[..]);
    [(adapters, none), (None, whole), (adapters, whole), (magnitudes, none), (magnitudes, whole)]
        .map(|(adapters, train)| Run::of(adapters, train))
}

/// Of the section `lora`.
#[derive(Clone, Copy)]
struct Adapters {
    targets: &'static str,
    use_dora: bool,
}

/// A run that has left everything, and what it was made of.
struct Run {
    _data: TempDir,
    dir: TempDir,
    spec: RunSpec,
    dataset: Dataset,
    layout: TrainableLayout,
    values: Vec<f32>,
}

impl Run {
    /// With adapters alone.
    fn new() -> Self {
        Self::of(Some(Adapters { targets: LORA, use_dora: false }), &[])
    }

    /// A run whose trainables have drifted away from what they began with, on a checkpoint in float32: with
    /// adapters of these targets, and modules that train in full.
    fn of(adapters: Option<Adapters>, train: &[&str]) -> Self {
        let recording = Recording::default();
        let (data, dir) = (recording.write(), tempfile::tempdir().unwrap());
        let (like, model) = (assets().join("tiny-vla"), dir.path().join("model"));
        let dtype = WeightsDtype::Float32;
        SyntheticCheckpoint { like: &like, tokenizer: None, out: &model, dtype, seed: 3 }.write().unwrap();
        let mut spec = recording.spec(data.path());
        spec.vla_mut().model.path = model.display().to_string();
        let lora = adapters.map(|Adapters { targets, use_dora }| {
            json!({"rank": 2, "alpha": 4.0, "targets": targets, "use_dora": use_dora})
        });
        spec.vla_mut().lora = lora.map(|lora| serde_json::from_value(lora).unwrap());
        spec.vla_mut().model.train = train.iter().map(|&pattern| pattern.to_owned()).collect();
        spec.vla_mut().sensor.tokens = 2;
        let dataset = Dataset::open(&spec).unwrap();
        let Built { objective, layout, initial } =
            TaskOn::<Flex>::build(&VlaFlow, &spec, &dataset, &Default::default()).unwrap();
        let drifted = |(at, value): (usize, &f32)| value + 0.05 * (at as f32).sin();
        let values: Vec<f32> = initial.iter().enumerate().map(drifted).collect();
        objective.export(dir.path(), &layout, &values).unwrap();
        let merged = objective.export_merged(&dir.path().join("merged"), &layout, &values);
        merged.expect("something of the model trains").unwrap();
        for file in Samples::files(&dataset) {
            std::fs::write(dir.path().join(file.path), file.text).unwrap();
        }
        Self { _data: data, dir, spec, dataset, layout, values }
    }

    fn responder(&self) -> PolicyResponder<Flex> {
        PolicyResponder::open(&self.spec, self.dir.path(), &Default::default())
            .unwrap_or_else(|error| panic!("{error}"))
    }
}

/// What a robot sees in this frame of the first episode.
fn observation(frame: usize) -> Named {
    let numbers = |shape: &[usize], values: &[f32]| {
        Value::Numbers(Array { shape: shape.to_vec(), values: values.to_vec() })
    };
    let mut named = Named::new();
    for (number, (name, height, width)) in Recording::default().cameras.into_iter().enumerate() {
        let values = vec![(frame * 10 + number) as u8; height * width * 3];
        named.insert(name.into(), Value::Bytes(Array { shape: vec![height, width, 3], values }));
    }
    named.insert("observation.state".into(), numbers(&[3], &recording::state(0, frame)));
    let window = recording::sensor(0, frame);
    named.insert("observation.sensor".into(), numbers(&[WINDOW, CHANNELS], &window));
    named.insert("prompt".into(), Value::Text(recording::task(0)));
    named.insert("seed".into(), Value::Integer(frame as i64));
    named
}

fn answers(responder: &dyn Responder, observations: &[Named]) -> Vec<Vec<f32>> {
    let reader = responder.reader();
    let samples: Vec<_> = observations.iter().map(|named| reader.read(named).unwrap()).collect();
    let actions = |named: Named| match &named["actions"] {
        Value::Numbers(array) => {
            assert_eq!(array.shape, [4, 2]);
            array.values.clone()
        }
        other => panic!("{other:?}"),
    };
    responder.answer(&samples).unwrap().into_iter().map(actions).collect()
}

#[track_caller]
fn assert_near(found: &[Vec<f32>], expected: &[Vec<f32>], tolerance: f32) {
    for (found, expected) in found.iter().flatten().zip(expected.iter().flatten()) {
        assert!((found - expected).abs() <= tolerance * (1.0 + expected.abs()), "{found} for {expected}");
    }
}

#[test]
fn a_frame_is_answered_as_evaluation_answers_its_sample() {
    variants().iter().for_each(is_answered_as_evaluated);
}

fn is_answered_as_evaluated(run: &Run) {
    let device = Default::default();
    let (policy, ..) = Policy::<Flex>::load(&run.spec, run.dataset.dims(), &device).unwrap();
    let trainables = Trainables::new(run.layout.clone(), run.values.clone(), &device);
    let samples: Vec<_> = FRAMES.map(|frame| Samples::read(&run.dataset, frame as u64).unwrap()).into();
    let samples_dyn: &dyn Samples = &run.dataset;
    let batch = samples_dyn.batch(Step(0), &samples);
    let mut expected = policy.sample_actions(&trainables, batch.content(), run.spec.run.seed).unwrap();
    run.dataset.denormalize_actions(&mut expected);
    let expected: Vec<Vec<f32>> = expected.chunks(8).map(<[f32]>::to_vec).collect();
    let found = answers(&run.responder(), &FRAMES.map(observation));
    assert_eq!(found, expected);
    assert_ne!(found[0], found[1]);
}

#[test]
fn an_answer_does_not_depend_on_who_else_asks() {
    let responder = Run::new().responder();
    let together = answers(&responder, &FRAMES.map(observation));
    let mut longer = observation(1);
    longer.insert("prompt".into(), Value::Text("a much longer instruction than those of the others".into()));
    let beside = answers(&responder, &[observation(FRAMES[0]), longer]);
    let alone: Vec<_> = FRAMES.iter().flat_map(|f| answers(&responder, &[observation(*f)])).collect();
    assert_near(&together, &alone, 1e-5);
    assert_near(&beside[..1], &alone[..1], 1e-5);
}

#[test]
fn noise_is_drawn_by_the_seed_or_given() {
    let responder = Run::new().responder();
    let of = |change: &dyn Fn(&mut Named)| {
        let mut named = observation(0);
        change(&mut named);
        answers(&responder, &[named])
    };
    let drawn = of(&|_| {});
    assert_eq!(drawn, of(&|_| {}));
    assert_ne!(drawn, of(&|named| drop(named.insert("seed".into(), Value::Integer(9)))));
    let noise = crate::vla_flow::flow::starting_noise(5, &[0], 8);
    let given = Value::Numbers(Array { shape: vec![4, 2], values: noise });
    assert_eq!(drawn, of(&|named| drop(named.insert("noise".into(), given.clone()))));
}

#[test]
fn a_bad_observation_is_refused_by_the_name_of_what_is_wrong() {
    let responder = Run::new().responder();
    let reader = responder.reader();
    let numbers =
        |values: &[f32]| Some(Value::Numbers(Array { shape: vec![values.len()], values: values.to_vec() }));
    let (camera, state) = ("observation.images.wrist", "observation.state");
    let small = Some(Value::Bytes(Array { shape: vec![2, 2, 3], values: vec![0; 12] }));
    let floats = Some(Value::Numbers(Array { shape: vec![28, 28, 3], values: vec![0.0; 28 * 28 * 3] }));
    for (name, value, wanted) in [
        (camera, None, "missing; expected uint8 [28, 28, 3]"),
        (camera, small, "found uint8 [2, 2, 3]"),
        (camera, floats, "found numbers [28, 28, 3]"),
        (state, None, "missing"),
        (state, numbers(&[1.0, 2.0]), "found numbers [2]; expected numbers [3]"),
        (state, numbers(&[1.0, f32::NAN, 2.0]), "element 1 is NaN"),
        (state, Some(Value::Text("a".into())), "found text"),
        ("observation.sensor", numbers(&[0.0; 6]), "expected numbers [3, 2]"),
        ("prompt", None, "missing"),
        ("prompt", Some(Value::Text("a".repeat(5000))), "5000 bytes"),
        ("prompt", Some(Value::Text("<|image_pad|>".into())), "placeholders"),
        ("seed", Some(Value::Text("1".into())), "found text"),
        ("noise", numbers(&[0.0; 8]), "expected numbers [4, 2]"),
    ] {
        let mut named = observation(0);
        named.remove(name);
        named.extend(value.map(|value| (name.to_owned(), value)));
        let refused = reader.read(&named).unwrap_err();
        assert_eq!(refused.name, name);
        assert!(refused.problem.contains(wanted), "{refused}");
    }
}

#[test]
fn what_a_run_has_not_left_is_named() {
    let run = Run::new();
    let open = |dir: &Path| PolicyResponder::<Flex>::open(&run.spec, dir, &Default::default()).err();
    let refused = |dir: &Path| open(dir).expect("something is missing").to_string();
    let elsewhere = tempfile::tempdir().unwrap();
    assert!(refused(elsewhere.path()).contains(PolicyFile::PATH));
    std::fs::remove_file(run.dir.path().join("expert.safetensors")).unwrap();
    assert!(refused(run.dir.path()).contains("expert.safetensors"));
}

#[test]
fn a_merged_model_answers_as_the_adapted_one() {
    variants().iter().for_each(answers_alike_merged);
}

fn answers_alike_merged(run: &Run) {
    let expected = answers(&run.responder(), &FRAMES.map(observation));
    let mut merged = run.spec.clone();
    merged.vla_mut().model.path = run.dir.path().join("merged").display().to_string();
    merged.vla_mut().lora = None;
    merged.vla_mut().model.train = Vec::new();
    let responder = PolicyResponder::<Flex>::open(&merged, run.dir.path(), &Default::default()).unwrap();
    assert_near(&answers(&responder, &FRAMES.map(observation)), &expected, 1e-4);
    // And it is the merge that does it.
    merged.vla_mut().model.path = run.dir.path().join("model").display().to_string();
    let plain = PolicyResponder::<Flex>::open(&merged, run.dir.path(), &Default::default()).unwrap();
    assert_ne!(answers(&plain, &FRAMES.map(observation)), expected);
}
