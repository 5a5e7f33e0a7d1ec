//! The head against PyTorch, and a policy with it against Transformers, on the fixtures of
//! `integration-tests/fixtures/make_oft.py`; prompts, sizes, and what is kept.

use std::{collections::HashMap, path::Path, sync::Arc};

use burn::{
    backend::Flex,
    tensor::{Tensor, TensorData},
};
use coxswain_models::{families::shelf, vision_language::PromptForm};
use coxswain_nn::{
    params::{FlatGrads, ParamSpec, TrainableLayout, Trainables},
    recompute::segment::Input,
};
use coxswain_proto::{ids::Step, run_spec::RunSpec};
use coxswain_task::StageClock;
use safetensors::SafeTensors;
use serde_json::{Value, json};

use super::*;
use crate::vla_flow::{
    data::{MicroBatch, Sample, SampleDims, collate},
    expert::Learning,
    policy::Policy,
    testing::small::{self, MODEL, relative_error},
};

const VALUES: f64 = 1e-5;
const GRADIENTS: f64 = 1e-3;
const TASKS: [&str; 2] = ["open the drawer", "push the red button, then wait."];

/// The head's layers, in the order of their phases.
const LAYERS: [&str; 4] = ["in", "blocks.0", "blocks.1", "out"];

/// A matrix that the fixture's script has in place of a random one.
fn wave(rows: usize, columns: usize, phase: usize) -> Vec<f32> {
    let value = |at: usize| 0.37 * ((at / columns + 1) * (at % columns + 1)) as f64 + phase as f64;
    (0..rows * columns).map(|at| value(at).sin() as f32).collect()
}

/// A fixture: its tensors, flat, and its sizes.
struct GoldenOft {
    tensors: HashMap<String, Vec<f32>>,
    sizes: HashMap<String, String>,
}

impl GoldenOft {
    fn path(name: &str) -> std::path::PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../integration-tests/fixtures/oft").join(name)
    }

    fn read(name: &str) -> Self {
        let bytes = std::fs::read(Self::path(name)).expect("a fixture");
        let floats =
            |bytes: &[u8]| bytes.chunks(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
        let file = SafeTensors::deserialize(&bytes).expect("a fixture");
        let tensors = file.tensors().into_iter().map(|(name, view)| (name, floats(view.data()))).collect();
        let (_, header) = SafeTensors::read_metadata(&bytes).expect("a fixture");
        Self { tensors, sizes: header.metadata().clone().expect("sizes") }
    }

    fn size(&self, name: &str) -> usize {
        self.sizes[name].parse().expect("a number")
    }

    fn values(&self, layout: &TrainableLayout, values: &mut [f32]) {
        for param in layout.params() {
            let matrix = LAYERS.iter().position(|layer| param.name == format!("expert.{layer}.fc.weight"));
            let values = &mut values[param.range()];
            if let Some(phase) = matrix {
                let scale = (param.shape[1] as f64).sqrt() as f32;
                values.copy_from_slice(&wave(param.shape[0], param.shape[1], phase));
                values.iter_mut().for_each(|value| *value /= scale);
            } else if let Some(given) = self.tensors.get(&format!("param.{}", param.name)) {
                values.copy_from_slice(given);
            }
        }
    }

    #[track_caller]
    fn holds(&self, what: &str, ours: &[f32], tolerance: f64) {
        let error = relative_error(ours, &self.tensors[what]);
        println!("{what}: {error:.1e}");
        assert!(error <= tolerance, "{what} is off by {error:.2e}");
    }
}

fn upload(values: &[f32], columns: usize) -> Tensor<Flex, 2> {
    let shape = [values.len() / columns, columns];
    Tensor::from_data(TensorData::new(values.to_vec(), shape), &Default::default())
}

fn download(x: Tensor<Flex, 2>) -> Vec<f32> {
    x.into_data().into_vec().expect("float32")
}

#[test]
fn the_head_computes_what_pytorch_computes_and_steps_that_do_not_count_move_nothing() {
    let golden = GoldenOft::read("head.safetensors");
    let [batch, context, horizon, action] =
        ["batch", "context", "horizon", "action"].map(|name| golden.size(name));
    let mut layout = TrainableLayout::default();
    let head = OftHead::register(&mut layout, OftShape { context, horizon, action }, Learning::Whole);
    let mut values = vec![f32::NAN; layout.len()];
    golden.values(&layout, &mut values);
    let trainables = Trainables::<Flex>::new(layout.clone(), values, &Default::default());
    let hidden_nd = upload(&golden.tensors["in.hidden"], context);
    let (actions_nc, trace) = head.forward(&trainables, Input::tracked(hidden_nd.clone()), batch);
    let actions = download(actions_nc);
    golden.holds("out.actions", &actions, VALUES);
    assert_eq!(download(head.actions(&trainables, hidden_nd, batch)), actions, "with a trace and without");

    let clean = CleanActions {
        samples: &[0, 1, 2],
        actions: &golden.tensors["in.actions"],
        valid: &golden.tensors["in.counts"],
        action,
        widths: &vec![action; batch],
    };
    let loss = absolute_error(&actions, clean);
    golden.holds("out.loss", &[loss.sum() as f32], VALUES);
    let mut grads = FlatGrads::new(layout.len());
    let dhidden_nd = OftHead::backward(trace, upload(&loss.gradient, action), &mut grads).expect("tracked");
    golden.holds("grad.in.hidden", &download(dhidden_nd), GRADIENTS);
    for param in layout.params() {
        golden.holds(&format!("grad.{}", param.name), &grads.values()[param.range()], GRADIENTS);
    }
}

/// A run with the head on the checkpoint in `model`.
fn spec(model: &str, changes: &[(&str, Value)]) -> RunSpec {
    let ours = [
        ("model", json!({"path": model})),
        ("expert", json!({"preset": "oft"})),
        ("data", json!({"path": "unused", "cameras": ["unused"], "state": "none", "horizon": 4})),
    ];
    small::spec(&[&ours[..], changes].concat())
}

const DIMS: SampleDims = SampleDims { state: 0, sensor_window: 0, sensor_channels: 0, ..small::DIMS };

fn load(spec: &RunSpec) -> (Policy<Flex>, TrainableLayout, Vec<f32>) {
    Policy::<Flex>::load(spec, shelf(), DIMS, &Default::default()).unwrap_or_else(|error| panic!("{error}"))
}

fn prompts(model: &Path, horizon: usize, max_text_tokens: Option<usize>) -> OftPrompts {
    let family = shelf::<Flex>().vision_language.of(model).expect("its family is read");
    let form = PromptForm { template: "{task}", images: 1, max_text_tokens };
    OftPrompts::new(family.prompts(model, &form).expect("its tokenizer"), horizon).expect("it has bytes")
}

/// The checkpoint, with a token for the action character.
fn with_action_token() -> tempfile::TempDir {
    let dir = tempfile::tempdir().expect("a temporary directory");
    for name in ["config.json", "model.safetensors", "preprocessor_config.json", "tokenizer_config.json"] {
        std::fs::copy(Path::new(MODEL).join(name), dir.path().join(name)).expect("part of the repository");
    }
    std::fs::copy(GoldenOft::path("tokenizer.json"), dir.path().join("tokenizer.json")).expect("a fixture");
    dir
}

/// The prompts of the fixture's tasks, side by side, as this policy sees them.
fn golden_batch(golden: &GoldenOft, prompts: &OftPrompts) -> MicroBatch {
    let grid = [1, 4, 6];
    let pixels = wave(2 * 24, 1176, LAYERS.len());
    let actions = golden.tensors["in.actions"].chunks_exact(DIMS.horizon * DIMS.action);
    let sample = |(index, (pixels, actions)): (usize, (&[f32], &[f32]))| Sample {
        index: index as u64,
        input_ids: coxswain_models::vision_language::PromptEncoder::encode(prompts, TASKS[index], &[grid])
            .expect("a prompt"),
        pixel_values: Arc::new(pixels.to_vec()),
        image_shapes: vec![grid],
        actions: actions.to_vec(),
        action_width: DIMS.action,
        action_is_pad: vec![false; DIMS.horizon],
        ..Sample::default()
    };
    let samples: Vec<_> = pixels.chunks_exact(24 * 1176).zip(actions).enumerate().map(sample).collect();
    collate(Step(1), &samples, 0)
}

#[test]
fn a_policy_is_starvlas_in_prompts_actions_loss_and_gradients() {
    let (golden, dir) = (GoldenOft::read("policy.safetensors"), with_action_token());
    let batch = golden_batch(&golden, &prompts(dir.path(), DIMS.horizon, None));
    for (row, valid) in batch.valid.iter().enumerate() {
        let ours = &batch.input_ids[row * batch.seq_len..][valid.start as usize..valid.end as usize];
        let whole = &golden.tensors[&format!("in.ids.{row}")];
        let starvlas: Vec<u32> = whole.iter().map(|&id| id as u32).collect();
        assert_eq!(ours, &starvlas[..ours.len()], "prompt {row}, up to its last action token");
        assert!(!starvlas[ours.len()..].contains(&(golden.size("token") as u32)));
    }
    let model = dir.path().to_str().expect("text");
    let train = json!([r"language_model\.embed_tokens", r"language_model\.layers\.0\.self_attn\.q_proj"]);
    let spec = spec(model, &[("lora", Value::Null), ("model", json!({"path": model, "train": train}))]);
    let (policy, layout, mut values) = load(&spec);
    golden.values(&layout, &mut values);
    let trainables = Trainables::new(layout.clone(), values, &Default::default());
    let mut grads = FlatGrads::new(layout.len());
    let loss = policy.forward_backward(&trainables, &batch, &mut grads, &mut StageClock::default());
    let loss = loss.expect("a sound batch");
    assert_eq!(loss.valid, (2 * DIMS.horizon * DIMS.action) as f64);
    golden.holds("out.loss", &[(loss.loss_sum / loss.valid) as f32], VALUES);
    assert_eq!(policy.loss(&trainables, &batch).expect("sound"), loss);
    golden.holds("out.actions", &policy.sample_actions(&trainables, &batch, 7).expect("sound"), VALUES);

    let mean: Vec<f32> = grads.values().iter().map(|gradient| gradient / loss.valid as f32).collect();
    let of = |end: &str| {
        let param = layout.params().iter().find(|param| param.name.ends_with(end)).expect("it trains");
        &mean[param.range()]
    };
    let named = |param: &ParamSpec| format!("grad.{}", param.name);
    let there = layout.params().iter().filter(|param| golden.tensors.contains_key(&named(param)));
    let held = there.map(|param| golden.holds(&named(param), &mean[param.range()], GRADIENTS)).count();
    assert_eq!(held, 13, "gains and biases of all four layers, and the last one's matrix");
    golden.holds("grad.q", &of("layers.0.self_attn.q_proj.weight")[..8 * 128], GRADIENTS);
    let (table, token) = (of("embed_tokens.weight"), golden.size("token"));
    golden.holds("grad.embed.action", &table[token * 128..][..128], GRADIENTS);
    let norm = table.iter().map(|&value| f64::from(value).powi(2)).sum::<f64>().sqrt();
    golden.holds("grad.embed.norm", &[norm as f32], GRADIENTS);
}

#[test]
fn prompts_end_with_an_action_token_for_each_action_and_limits_are_of_the_text_alone() {
    use coxswain_models::vision_language::PromptEncoder as _;
    let grids = [[1, 4, 6]];
    // No token for the character: the first of those that it is made of.
    let split = prompts(MODEL.as_ref(), 5, None);
    let ids = split.encode("open the drawer", &grids).expect("a prompt");
    let (rest, actions) = ids.split_at(ids.len() - 5);
    assert!(actions.iter().all(|id| *id == actions[0]) && rest.last() != actions.first(), "{ids:?}");
    let text = split.render("open the drawer");
    let ending = "<|vision_end|>open the drawer Please predict the next 5 robot actions: <action>🔍🔍🔍🔍🔍";
    assert!(text.ends_with(ending) && split.template().contains("{task} Please"), "{text}");
    let short = prompts(MODEL.as_ref(), 5, Some(2));
    let cut = short.encode("open the drawer", &grids).expect("a prompt");
    assert_eq!(ids.len() - cut.len(), short.cut("open the drawer"));
    assert_eq!(cut[cut.len() - 12..], ids[ids.len() - 12..]);
    let like = split.like(&PromptForm { template: "now {task}", images: 1, max_text_tokens: None });
    assert!(like.render("go").contains("now go Please predict"));
}

#[test]
fn a_cut_batch_has_the_gradients_of_a_whole_one_and_kept_features_the_bits_of_live_ones() {
    let frozen = |mode: &str| spec(MODEL, &[("lora", Value::Null), ("cache", json!({"mode": mode}))]);
    let (policy, layout, mut values) = load(&frozen("exact"));
    let noise = small::normal(layout.len(), 9);
    values.iter_mut().zip(noise).for_each(|(value, noise)| *value += 0.05 * noise);
    let trainables = Trainables::new(layout.clone(), values, &Default::default());
    let run = |batch: &MicroBatch, grads: &mut FlatGrads| {
        let clock = &mut StageClock::default();
        policy.forward_backward(&trainables, batch, grads, clock).expect("a sound batch")
    };
    let [mut whole, mut parts, mut kept] = [0; 3].map(|_| FlatGrads::new(layout.len()));
    let batch = small::batch(&[0, 1, 2]);
    let loss = run(&batch, &mut whole);
    assert_eq!(loss.valid, 22.0, "a step past the episode's end does not count");
    let sums = [&[0, 1][..], &[2]].map(|rows| run(&small::batch(rows), &mut parts).loss_sum);
    assert!((sums.iter().sum::<f64>() - loss.loss_sum).abs() < 1e-5 * loss.loss_sum);
    assert!(relative_error(parts.values(), whole.values()) < 1e-5);

    let features = policy.features_below(&trainables, &batch).expect("a tap");
    let cached = MicroBatch { features: Some(features), pixel_values: Vec::new(), ..batch };
    assert_eq!(run(&cached, &mut kept), loss);
    assert!(kept.values() == whole.values());
}

#[test]
fn what_the_head_does_not_see_is_refused_by_name() {
    let refused = |dims: SampleDims| {
        let loaded = Policy::<Flex>::load(&spec(MODEL, &[]), shelf(), dims, &Default::default());
        loaded.err().map(|error| error.to_string()).expect("refused")
    };
    assert!(refused(SampleDims { state: 3, ..DIMS }).starts_with("data.state: is an input"));
    let sensor = SampleDims { sensor_window: 4, sensor_channels: 2, ..DIMS };
    assert!(refused(sensor).starts_with("data.sensor: is an input"));
}
