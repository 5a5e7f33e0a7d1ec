//! Observations checked, and answered as evaluation would.

mod chunking;
mod lerobot;
mod mixture;
mod observed;
mod oft;
mod qwen_pi;

use coxswain_models::Shelves;
use coxswain_models::families::shelf;
use coxswain_nn::kernels::sizes::Sizes;
use std::path::Path;

use burn::backend::Flex;
use coxswain_models::pretrained::synthetic::SyntheticCheckpoint;
use coxswain_nn::{
    dtypes::WeightsDtype,
    params::{TrainableLayout, Trainables},
};
use coxswain_proto::{ids::Step, run_spec::RunSpec};
use coxswain_task::{Array, Assembly, NamedValues, Responder, Samples, TaskOn, Value};
use serde_json::json;
use tempfile::TempDir;

use super::PolicyResponder;
use crate::vla_flow::{
    VlaFlow,
    config::{Serve, VlaSettings, VlaSpec},
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
/// beside whole modules; both with all biases.
fn variants() -> [Run; 6] {
    let [adapters, magnitudes] = [false, true].map(|use_dora| lora("use_dora", json!(use_dora)));
    let (none, whole) = (&[][..], &WHOLE[..]);
    [
        (adapters.clone(), none),
        (None, whole),
        (adapters, whole),
        (magnitudes.clone(), none),
        (magnitudes, whole),
        (lora("bias", json!("all")), whole),
    ]
    .map(|(lora, train)| Run::of(lora, train))
}

/// The section `lora` with one key more.
fn lora(key: &str, value: serde_json::Value) -> Option<serde_json::Value> {
    let mut section = json!({"rank": 2, "alpha": 4.0, "targets": LORA});
    section[key] = value;
    Some(section)
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
        Self::of(lora("use_dora", json!(false)), &[])
    }

    /// With this section `lora`, and modules that train in full.
    fn of(lora: Option<serde_json::Value>, train: &[&str]) -> Self {
        Self::made(train, |vla| vla.lora = lora.map(|lora| serde_json::from_value(lora).unwrap()))
    }

    /// A run whose trainables have drifted away from what they began with, on a checkpoint in float32.
    fn made(train: &[&str], change: impl FnOnce(&mut VlaSettings)) -> Self {
        let recording = Recording::default();
        let (data, dir) = (recording.write(), tempfile::tempdir().unwrap());
        let (like, model) = (assets().join("tiny-vla"), dir.path().join("model"));
        let dtype = WeightsDtype::Float32;
        let checkpoint = SyntheticCheckpoint { like: &like, tokenizer: None, out: &model, dtype, seed: 3 };
        let family = shelf::<Sizes>().vision_language.of(&like).unwrap();
        family.make_checkpoint(&checkpoint).unwrap();
        let mut spec = recording.spec(data.path());
        spec.vla_mut().model.path = model.display().to_string();
        change(&mut spec.vla_mut());
        spec.vla_mut().model.train = train.iter().map(|&pattern| pattern.to_owned()).collect();
        spec.vla_mut().sensor.tokens = 2;
        let dataset = Dataset::from_spec(&spec, shelf()).unwrap();
        let Assembly { objective, layout, initial } =
            TaskOn::<Flex>::build(&VlaFlow::<Flex>::default(), &spec, &dataset, &Default::default()).unwrap();
        let drifted = |(at, value): (usize, &f32)| value + 0.05 * (at as f32).sin();
        let values: Vec<f32> = initial.iter().enumerate().map(drifted).collect();
        objective.export(dir.path(), &layout, &values).unwrap();
        if let Some(merged) = objective.export_merged(&dir.path().join("merged"), &layout, &values) {
            merged.unwrap();
        }
        for file in Samples::files(&dataset) {
            std::fs::write(dir.path().join(file.path), file.text).unwrap();
        }
        Self { _data: data, dir, spec, dataset, layout, values }
    }

    fn responder(&self) -> PolicyResponder {
        PolicyResponder::load::<Flex>(&self.spec, Shelves::default(), self.dir.path(), &Default::default())
            .unwrap_or_else(|error| panic!("{error}"))
    }
}

/// What a robot sees in this frame of the first episode.
fn observation(frame: usize) -> NamedValues {
    let numbers = |shape: &[usize], values: &[f32]| Value::numbers(shape.to_vec(), values.to_vec());
    let mut named = NamedValues::new();
    for (number, (name, height, width)) in Recording::default().cameras.into_iter().enumerate() {
        let values = vec![(frame * 10 + number) as u8; height * width * 3];
        named.insert(name.into(), Value::bytes(vec![height, width, 3], values));
    }
    named.insert("observation.state".into(), numbers(&[3], &recording::state(0, frame)));
    let window = recording::sensor(0, frame);
    named.insert("observation.sensor".into(), numbers(&[WINDOW, CHANNELS], &window));
    named.insert("prompt".into(), Value::Text(recording::task(0)));
    named.insert("seed".into(), Value::Integer(frame as i64));
    named
}

fn answers(responder: &dyn Responder, observations: &[NamedValues]) -> Vec<Vec<f32>> {
    let reader = responder.reader();
    let samples: Vec<_> = observations.iter().map(|named| reader.read(named).unwrap()).collect();
    let actions = |named: NamedValues| match &named["actions"] {
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
fn an_expert_with_adapters_answers_from_what_a_run_has_left() {
    let run = Run::made(&[], |vla| {
        let targets = ["q_proj", "attn.q", "attn.v", "mlp.in", "final.out"];
        let lora = json!({"rank": 2, "alpha": 4.0, "targets": targets});
        vla.lora = Some(serde_json::from_value(lora).unwrap());
        vla.expert.train = false;
    });
    assert!(run.layout.params().iter().any(|param| param.name == "expert.final.out.lora_B.weight"));
    let left = std::fs::read(run.dir.path().join("expert.safetensors")).unwrap();
    let left = safetensors::SafeTensors::deserialize(&left).unwrap();
    assert!(left.names().iter().all(|name| !name.contains("lora")), "merged");
    let found = answers(&run.responder(), &FRAMES.map(observation));
    assert_near(&found, &expected(&run), 1e-4);
    let alone = Run::made(&[r"language_model\.norm"], |vla| {
        let lora = json!({"rank": 2, "alpha": 4.0, "targets": ["attn.q"]});
        vla.lora = Some(serde_json::from_value(lora).unwrap());
        vla.expert.train = false;
    });
    assert!(!alone.dir.path().join("adapter").exists(), "the model has none");
    assert_near(&answers(&alone.responder(), &FRAMES.map(observation)), &expected(&alone), 1e-4);
}

/// What evaluation samples of these frames.
fn expected(run: &Run) -> Vec<Vec<f32>> {
    let device = Default::default();
    let (policy, ..) = Policy::<Flex>::load(&run.spec, shelf(), run.dataset.dims(), &device).unwrap();
    let trainables = Trainables::new(run.layout.clone(), run.values.clone(), &device);
    let samples: Vec<_> = FRAMES.map(|frame| Samples::read(&run.dataset, frame as u64).unwrap()).into();
    let samples_dyn: &dyn Samples = &run.dataset;
    let batch = samples_dyn.batch(Step(0), &samples);
    let mut expected = policy.sample_actions(&trainables, batch.content(), run.spec.run.seed).unwrap();
    run.dataset.denormalize_actions(&mut expected);
    expected.chunks(8).map(<[f32]>::to_vec).collect()
}

#[test]
fn a_frame_is_answered_as_evaluation_answers_its_sample() {
    variants().iter().for_each(is_answered_as_evaluated);
}

fn is_answered_as_evaluated(run: &Run) {
    let expected = expected(run);
    let found = answers(&run.responder(), &FRAMES.map(observation));
    assert_eq!(found, expected);
    assert_ne!(found[0], found[1]);
}

#[test]
fn images_are_fitted_as_in_training_by_what_the_run_has_left() {
    for rule in ["letterbox 56", "crop 2/3"] {
        let run = Run::made(&[], |vla| vla.data.resize = rule.parse().unwrap());
        is_answered_as_evaluated(&run);
        let file = std::fs::read(run.dir.path().join(PolicyFile::PATH)).unwrap();
        let file: serde_json::Value = serde_json::from_slice(&file).unwrap();
        assert_eq!((&file["format"], &file["resize"]), (&json!(2), &json!(rule)));
        let grids = run.dataset.image_shapes().unwrap();
        assert_eq!(run.dataset.sample(0).unwrap().image_shapes, grids);
        assert_eq!(grids[0] == grids[1], rule.starts_with("letterbox"), "{grids:?}");
    }
}

#[test]
fn differences_are_added_to_the_state_that_was_observed() {
    let run = Run::made(&[], |vla| {
        vla.data.delta_actions = vec![false, true];
        vla.data.action_stride = 2;
        // Half of the recorded dimensions never change; a policy that acts may see others.
        vla.data.normalization.state = coxswain_data::NormMode::Identity;
    });
    let found = answers(&run.responder(), &FRAMES.map(observation));
    let differences = expected(&run);
    for (frame, (found, differences)) in FRAMES.iter().zip(found.iter().zip(&differences)) {
        let [_, second, _] = recording::state(0, *frame);
        let absolute = differences.chunks(2).flat_map(|action| [action[0], action[1] + second]);
        assert_eq!(found, &absolute.collect::<Vec<_>>());
    }
    let read = |path: &str| -> serde_json::Value {
        serde_json::from_slice(&std::fs::read(run.dir.path().join(path)).unwrap()).unwrap()
    };
    let file = read(PolicyFile::PATH);
    assert_eq!((&file["format"], &file["action_stride"]), (&json!(2), &json!(2)));
    assert_eq!(file["delta_actions"], json!([false, true]));
    let told = run.responder().reader().describe();
    assert_eq!(told["outputs"]["actions"]["stride"], json!(2));
    // Of what is learned, not of what was recorded: -f - f from frames 0 to 4 of an episode, 2 apart.
    assert_eq!(read("stats.json")["action"]["max"][1], json!(0.0));
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
    let of = |change: &dyn Fn(&mut NamedValues)| {
        let mut named = observation(0);
        change(&mut named);
        answers(&responder, &[named])
    };
    let drawn = of(&|_| {});
    assert_eq!(drawn, of(&|_| {}));
    assert_ne!(drawn, of(&|named| drop(named.insert("seed".into(), Value::Integer(9)))));
    let noise = crate::vla_flow::flow::starting_noise(5, &[0], 8);
    let given = Value::numbers(vec![4, 2], noise);
    assert_eq!(drawn, of(&|named| drop(named.insert("noise".into(), given.clone()))));
}

#[test]
fn a_bad_observation_is_refused_by_the_name_of_what_is_wrong() {
    let responder = Run::new().responder();
    let reader = responder.reader();
    let numbers = |values: &[f32]| Some(Value::numbers(vec![values.len()], values.to_vec()));
    let (camera, state) = ("observation.images.wrist", "observation.state");
    let small = Some(Value::bytes(vec![2, 2, 3], vec![0; 12]));
    let floats = Some(Value::numbers(vec![28, 28, 3], vec![0.0; 28 * 28 * 3]));
    let wide = Array { shape: vec![28, 28, 3], values: vec![0.0; 28 * 28 * 3], dtype: "int64" };
    let wide = Some(Value::Numbers(wide));
    for (name, value, wanted) in [
        (camera, None, "missing; expected uint8 [28, 28, 3]"),
        (
            camera,
            None,
            "observation.state (float32 [3]), prompt (text); the policy needs observation.images.",
        ),
        (camera, small, "found uint8 [2, 2, 3]"),
        (
            camera,
            floats,
            "found float32 [28, 28, 3]; expected uint8 [28, 28, 3] (height, width, RGB); convert it with \
             image.astype(np.uint8), or (255 * image).astype(np.uint8) if its values are from 0 to 1",
        ),
        (
            camera,
            wide,
            "found int64 [28, 28, 3]; expected uint8 [28, 28, 3] (height, width, RGB); convert it with \
             image.astype(np.uint8)",
        ),
        (state, None, "missing"),
        (state, numbers(&[1.0, 2.0]), "found float32 [2]; expected numbers [3]"),
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

/// An observation whose pixels differ from each other.
fn colourful(frame: usize) -> NamedValues {
    let mut named = observation(frame);
    let Some(Value::Bytes(wrist)) = named.get_mut("observation.images.wrist") else { panic!("it is bytes") };
    wrist.values.iter_mut().enumerate().for_each(|(at, value)| *value = (at % 251) as u8);
    named
}

/// The colourful observation as a robot of openpi's has it: names of its own, the state in two parts, a
/// camera with its channels first.
fn renamed(frame: usize) -> NamedValues {
    let mut named = colourful(frame);
    for (from, to) in [
        ("observation.images.front", "observation/image"),
        ("observation.sensor", "tactile"),
        ("prompt", "instruction"),
    ] {
        let value = named.remove(from).unwrap();
        named.insert(to.into(), value);
    }
    let Some(Value::Numbers(state)) = named.remove("observation.state") else { panic!("it is numbers") };
    named.insert("joints".into(), Value::numbers(vec![2], state.values[..2].to_vec()));
    named.insert("gripper".into(), Value::numbers(vec![], state.values[2..].to_vec()));
    let Some(Value::Bytes(wrist)) = named.remove("observation.images.wrist") else { panic!("it is bytes") };
    let [height, width, _] = wrist.shape[..] else { panic!("{:?}", wrist.shape) };
    let values = (0..3).flat_map(|c| wrist.values.iter().skip(c).step_by(3).copied()).collect();
    named.insert("wrist".into(), Value::bytes(vec![3, height, width], values));
    named
}

#[test]
fn values_are_found_under_the_names_of_the_section_serve() {
    let mut run = Run::new();
    let expected = answers(&run.responder(), &FRAMES.map(colourful));
    run.spec.vla_mut().serve = Serve {
        cameras: vec!["observation/image".into(), "wrist".into()],
        state: vec!["joints".into(), "gripper".into()],
        sensor: Some("tactile".into()),
        prompt: "instruction".into(),
        set: None,
    };
    let responder = run.responder();
    assert_eq!(answers(&responder, &FRAMES.map(renamed)), expected);

    let reader = responder.reader();
    let told = reader.describe();
    assert_eq!(told["inputs"]["observation/image"]["feature"], "observation.images.front");
    assert_eq!(told["inputs"]["gripper"]["part_of"], json!({"names": ["joints", "gripper"], "shape": [3]}));
    assert_eq!(told["inputs"].as_object().unwrap().len(), 6);
    reader.read(&reader.example()).expect("it describes what it takes");

    let refused = |change: &dyn Fn(&mut NamedValues)| {
        let mut named = renamed(0);
        change(&mut named);
        reader.read(&named).unwrap_err().to_string()
    };
    let longer = Value::numbers(vec![4], vec![0.0; 4]);
    for (problem, wanted) in [
        (refused(&|named| drop(named.remove("wrist"))), "wrist: missing; expected uint8 [28, 28, 3]"),
        (
            refused(&|named| drop(named.remove("wrist"))),
            ", for observation.images.wrist. The observation has",
        ),
        (
            refused(&|named| drop(named.remove("gripper"))),
            "gripper: missing; expected numbers (all parts together have shape [3])",
        ),
        (
            refused(&|named| drop(named.insert("joints".into(), longer.clone()))),
            "joints, gripper: found 4 + 1 numbers, but observation.state has the shape [3]",
        ),
    ] {
        assert!(problem.contains(wanted), "{problem}");
    }
}

#[test]
fn other_names_are_told_to_who_loads_the_policy_elsewhere() {
    let mut run = Run::new();
    let file = |spec: &RunSpec| {
        let files = Samples::files(&Dataset::from_spec(spec, shelf()).unwrap());
        let policy = files.into_iter().find(|file| file.path == PolicyFile::PATH).unwrap();
        serde_json::from_str::<serde_json::Value>(&policy.text).unwrap()
    };
    assert_eq!(file(&run.spec).get("observation"), None);
    run.spec.vla_mut().serve.state = vec!["state".into()];
    let wanted = json!({
        "cameras": ["observation.images.front", "observation.images.wrist"],
        "state": ["state"], "sensor": "observation.sensor", "prompt": "prompt",
    });
    assert_eq!(file(&run.spec)["observation"], wanted);
}

#[test]
fn what_a_run_has_not_left_is_named() {
    let run = Run::new();
    let open = |dir: &Path| {
        PolicyResponder::load::<Flex>(&run.spec, Shelves::default(), dir, &Default::default()).err()
    };
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
    let responder =
        PolicyResponder::load::<Flex>(&merged, Shelves::default(), run.dir.path(), &Default::default())
            .unwrap();
    assert_near(&answers(&responder, &FRAMES.map(observation)), &expected, 1e-4);
    // And it is the merge that does it.
    merged.vla_mut().model.path = run.dir.path().join("model").display().to_string();
    let plain =
        PolicyResponder::load::<Flex>(&merged, Shelves::default(), run.dir.path(), &Default::default())
            .unwrap();
    assert_ne!(answers(&plain, &FRAMES.map(observation)), expected);
}
