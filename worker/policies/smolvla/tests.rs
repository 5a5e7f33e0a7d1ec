//! A tiny policy against LeRobot: one training step of it, and a sampled chunk
//! (`integration-tests/fixtures/make_smolvla.py`).

use std::{collections::BTreeMap, fs, ops::Range, path::Path, sync::Arc};

use burn::{
    backend::Flex,
    tensor::{Tensor, TensorData},
};
use coxswain_models::{
    families::shelf,
    joint::JointOutline,
    pretrained::{
        pictures::{ImageProcessor, Rgb},
        prompts::{Prompts, Rows},
    },
    vision_language::{PromptEncoder, PromptForm},
};
use coxswain_nn::{
    dtypes::FrozenDtype,
    files::floats,
    kernels::sizes::Sizes,
    params::{FlatGrads, TrainableLayout, Trainables},
};
use coxswain_proto::run_spec::Recompute;
use safetensors::SafeTensors;
use serde_json::{Value, json};

use super::{
    images::{Planes, letterbox, patches},
    *,
};
use crate::{
    directory::{MeanStd, PolicyDirectory},
    export::{Export, PROCESSORS, Statistics, write},
};

const AT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../integration-tests/fixtures/golden/smolvla");
/// What of the difference to LeRobot, over the largest value, is let through: values, gradients, actions.
const VALUES: f32 = 1e-5;
const GRADIENTS: f32 = 1e-4;
const ACTIONS: f32 = 1e-4;

/// What LeRobot found, by name.
struct Expected {
    tensors: BTreeMap<String, (Vec<usize>, Vec<f32>)>,
    about: Value,
}

impl Expected {
    fn read() -> Self {
        let bytes = fs::read(Path::new(AT).join("expected.safetensors")).expect("part of the repository");
        let (_, header) = SafeTensors::read_metadata(&bytes).expect("safetensors");
        let about = header.metadata().as_ref().and_then(|all| serde_json::from_str(all.get("about")?).ok());
        let file = SafeTensors::deserialize(&bytes).expect("safetensors");
        let tensors = file.tensors().into_iter().map(|(name, view)| {
            let values = floats(&view).unwrap_or_else(|| match view.dtype() {
                safetensors::Dtype::U8 => view.data().iter().map(|byte| f32::from(*byte)).collect(),
                _ => view
                    .data()
                    .chunks(4)
                    .map(|id| i32::from_le_bytes(id.try_into().expect("4")) as f32)
                    .collect(),
            });
            (name, (view.shape().to_vec(), values))
        });
        Self { tensors: tensors.collect(), about: about.expect("written beside the tensors") }
    }

    fn of(&self, name: &str) -> &[f32] {
        &self.tensors[name].1
    }
}

fn close(what: &str, found: &[f32], expected: &[f32], tolerance: f32) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let largest = expected.iter().fold(0.0f32, |most, value| most.max(value.abs())).max(1e-12);
    let off = found.iter().zip(expected).fold(0.0f32, |most, (a, b)| most.max((a - b).abs()));
    println!("{what}: {:.1e}", off / largest);
    assert!(off <= tolerance * largest, "{what}: {off:e} of {largest:e}");
}

/// Rows of values, each followed by zeros.
fn padded(values: &[f32], width: usize, to: usize) -> Vec<f32> {
    let row =
        |row: &[f32]| row.iter().copied().chain(std::iter::repeat_n(0.0, to - width)).collect::<Vec<_>>();
    values.chunks(width).flat_map(row).collect()
}

/// The batch as this policy sees it: of a camera that a row has not, nothing is there.
struct Batch {
    ids: Vec<u32>,
    valid: Vec<Range<u32>>,
    pixels: Vec<Arc<Vec<f32>>>,
    image: u32,
    state: Vec<f32>,
    actions: Vec<f32>,
    noisy: Vec<f32>,
}

impl Batch {
    fn of(expected: &Expected, config: &SmolVlaConfig) -> Self {
        let outline = outline(&Path::new(AT).join("vlm"), config);
        let image = outline.image_token;
        let time = expected.of("time");
        let (mut rows, mut pixels) = (Vec::new(), Vec::new());
        for row in 0..time.len() {
            let mut ids = Vec::new();
            for camera in config.cameras.iter().filter(|camera| expected.tensors.contains_key(*camera)) {
                let mask = expected.tensors.get(&format!("{camera}_padding_mask"));
                if mask.is_some_and(|(_, seen)| seen[row] == 0.0) {
                    continue;
                }
                let (shape, bytes) = &expected.tensors[camera];
                let (size, each) = ([shape[2], shape[3]], 3 * shape[2] * shape[3]);
                let values: Vec<f32> = bytes[row * each..][..each].iter().map(|byte| byte / 255.0).collect();
                let square = letterbox(Planes { values: &values, size }, outline.image_side);
                pixels.push(Arc::new(patches(&square, outline.image_side, outline.patches.patch)));
                ids.resize(ids.len() + outline.image_tokens(), image);
            }
            let width = expected.tensors["tokens"].0[1];
            let tokens = expected.of("tokens")[row * width..][..width].iter();
            let mask = &expected.of("tokens.mask")[row * width..][..width];
            ids.extend(tokens.zip(mask).filter(|(_, seen)| **seen > 0.0).map(|(id, _)| *id as u32));
            rows.push(ids);
        }
        let longest = rows.iter().map(Vec::len).max().expect("a row");
        let valid = rows.iter().map(|row| 0..row.len() as u32).collect();
        let ids = rows.into_iter().flat_map(|mut row: Vec<u32>| {
            row.resize(longest, 0);
            row
        });
        let actions = padded(expected.of("action.normalized"), config.action, config.padded[1]);
        let each = actions.len() / time.len();
        let noisy = expected.of("noise").iter().zip(&actions).enumerate();
        let noisy =
            noisy.map(|(at, (noise, action))| time[at / each] * noise + (1.0 - time[at / each]) * action);
        let state = padded(expected.of("state.normalized"), config.state, config.padded[0]);
        Self { ids: ids.collect(), valid, pixels, image, state, noisy: noisy.collect(), actions }
    }

    fn observed(&self) -> Observed<'_> {
        let rows = Rows::Padded(&self.valid);
        let prompts = Prompts { input_ids: &self.ids, rows, images: &[], pixel_values: &self.pixels };
        Observed { prompts, image: self.image, state: &self.state }
    }
}

fn outline(dir: &Path, config: &SmolVlaConfig) -> JointOutline {
    let family = shelf::<Sizes>().joint.of(dir).expect("it is read");
    family.outline(dir, config.within()).expect("it is read")
}

fn policy() -> (SmolVla<Flex>, Trainables<Flex>) {
    let directory = PolicyDirectory::open(&Path::new(AT).join("policy")).expect("it is read");
    let (mut layout, device) = (TrainableLayout::default(), Default::default());
    let backbone = &Path::new(AT).join("vlm");
    let files = PolicyFiles { directory: &directory, backbone, dtype: FrozenDtype::Float32 };
    let policy = SmolVla::load(files, shelf(), &mut layout, &device).expect("it is read");
    let values = initial_values(&directory.dir, &layout).expect("they are there");
    (policy, Trainables::new(layout, values, &device))
}

fn vector(tensor: Tensor<Flex, 2>) -> Vec<f32> {
    tensor.into_data().into_vec().expect("f32")
}

#[test]
fn loss_velocity_and_gradients_are_those_of_lerobot_in_every_mode() {
    let (expected, (policy, trainables)) = (Expected::read(), policy());
    let batch = Batch::of(&expected, &policy.config);
    let draws = Draws { times: expected.of("time"), noisy: &batch.noisy };
    let target: Vec<f32> =
        expected.of("noise").iter().zip(&batch.actions).map(|(noise, action)| noise - action).collect();
    let valid: Vec<f32> = expected.of("action_is_pad").iter().map(|pad| 1.0 - pad).collect();
    let mut modes = Vec::new();
    for recompute in [Recompute::None, Recompute::Full] {
        let (velocity, trace) =
            policy.forward(&trainables, recompute, batch.observed(), draws).expect("it fits");
        let velocity = vector(velocity);
        close("velocity", &velocity, expected.of("velocity"), VALUES);
        let losses: Vec<f32> = velocity.iter().zip(&target).map(|(v, t)| (v - t) * (v - t)).collect();
        close("losses", &losses, expected.of("losses"), VALUES);
        let counts = |at: usize| at % 32 < policy.config.action && valid[at / 32] > 0.0;
        let count = (0..losses.len()).filter(|at| counts(*at)).count() as f32;
        let sum: f32 = losses.iter().enumerate().filter(|(at, _)| counts(*at)).map(|(_, loss)| loss).sum();
        close("loss", &[sum / count], expected.of("loss"), VALUES);
        let mut grads = FlatGrads::new(trainables.layout().len());
        let slopes = velocity.iter().zip(&target).enumerate();
        let scaled: Vec<f32> =
            slopes.map(|(at, (v, t))| if counts(at) { 2.0 * (v - t) / count } else { 0.0 }).collect();
        let shape = [scaled.len() / 32, 32];
        let dv = Tensor::from_data(TensorData::new(scaled, shape), &Default::default());
        policy.backward(&trainables, trace, dv, &mut grads);
        let silent: Vec<_> =
            trainables.layout().params().iter().filter(|param| !grads.touched(param)).collect();
        assert!(silent.is_empty(), "without a gradient: {silent:?}");
        modes.push(grads.values_mut().clone());
    }
    assert_eq!(modes[0], modes[1], "recompute changes nothing");
    let named = expected.tensors.keys().filter(|name| name.starts_with("grad.")).count();
    assert_eq!(trainables.layout().params().len(), named);
    for param in trainables.layout().params() {
        let name = format!("grad.{}", param.name);
        close(&name, &modes[0][param.range()], expected.of(&name), GRADIENTS);
    }
}

#[test]
fn sampled_actions_are_those_of_lerobot() {
    let (expected, (policy, trainables)) = (Expected::read(), policy());
    let batch = Batch::of(&expected, &policy.config);
    let velocity = policy.velocity(&trainables, batch.observed()).expect("it fits");
    let steps = policy.config.steps;
    let mut sampled = expected.of("noise").to_vec();
    for step in 0..steps {
        let time = [1.0 - step as f32 / steps as f32; 2];
        let v = vector(velocity(Draws { times: &time, noisy: &sampled }));
        sampled.iter_mut().zip(v).for_each(|(x, v)| *x -= v / steps as f32);
    }
    let action = policy.config.action;
    let sampled: Vec<f32> = sampled.chunks(32).flat_map(|step| step[..action].to_vec()).collect();
    close("sampled", &sampled, expected.of("sampled.normalized"), ACTIONS);
    let directory = PolicyDirectory::open(&Path::new(AT).join("policy")).expect("it is read");
    let statistics =
        directory.statistics("policy_postprocessor.json", "unnormalizer_processor").expect("they are there");
    let of = &statistics["action"];
    let places = sampled.iter().enumerate();
    let raw: Vec<f32> =
        places.map(|(at, value)| value * of.std[at % action] + of.mean[at % action]).collect();
    close("actions", &raw, expected.of("sampled"), ACTIONS);
}

#[test]
fn every_tensor_of_the_file_is_known_with_its_shape() {
    let (expected, directory) =
        (Expected::read(), PolicyDirectory::open(&Path::new(AT).join("policy")).expect("it is read"));
    let config = SmolVlaConfig::of(&directory).expect("it is read");
    let vlm = outline(&Path::new(AT).join("vlm"), &config);
    let own = config.own_tensors(&vlm, Some(16));
    let elements = |tensors: &[(String, Vec<usize>)]| {
        tensors.iter().map(|(_, shape)| shape.iter().product::<usize>()).sum::<usize>()
    };
    assert_eq!(Some(elements(&own) as u64), expected.about["trained"].as_u64());
    // A prediction, which has no values, is of the same policy.
    let (mut layout, backbone) = (TrainableLayout::default(), &Path::new(AT).join("vlm"));
    let files = PolicyFiles { directory: &directory, backbone, dtype: FrozenDtype::Float32 };
    SmolVla::<Sizes>::load(files, shelf(), &mut layout, &Default::default()).expect("it is read");
    assert_eq!(layout.len(), elements(&own));
    assert_eq!(Some((elements(&own) + vlm.parameters()) as u64), expected.about["parameters"].as_u64());
    let bytes = fs::read(directory.dir.join("model.safetensors")).expect("there");
    let file = SafeTensors::deserialize(&bytes).expect("safetensors");
    let stored: BTreeMap<_, _> =
        file.tensors().into_iter().map(|(name, view)| (name, view.shape().to_vec())).collect();
    let known: BTreeMap<_, _> = vlm.tensors.iter().chain(&own).cloned().collect();
    assert_eq!(known, stored);
}

#[test]
fn the_published_policy_has_its_parameters() {
    let dir = tempfile::tempdir().expect("a directory for the test");
    let vlm = json!({
        "model_type": "smolvlm", "scale_factor": 4,
        "text_config": {
            "model_type": "llama", "hidden_size": 960, "num_hidden_layers": 32, "num_attention_heads": 15,
            "num_key_value_heads": 5, "head_dim": 64, "intermediate_size": 2560, "vocab_size": 49280,
            "rms_norm_eps": 1e-5
        },
        "vision_config": { "hidden_size": 768, "num_attention_heads": 12, "image_size": 512, "patch_size": 16 }
    });
    fs::write(dir.path().join("config.json"), vlm.to_string()).expect("written");
    let outline_dir = dir.path().to_owned();
    let policy = json!({
        "type": "smolvla", "num_vlm_layers": 16, "resize_imgs_with_padding": [512, 512],
        "input_features": {
            "observation.state": {"type": "STATE", "shape": [6]},
            "observation.images.camera1": {"type": "VISUAL", "shape": [3, 256, 256]}
        },
        "output_features": {"action": {"type": "ACTION", "shape": [6]}}
    });
    let directory =
        PolicyDirectory { dir: dir.path().into(), path: dir.path().join("config.json"), json: policy };
    let config = SmolVlaConfig::of(&directory).expect("it is read");
    let vlm = outline(&outline_dir, &config);
    let own: usize =
        config.own_tensors(&vlm, None).iter().map(|(_, shape)| shape.iter().product::<usize>()).sum();
    assert_eq!((own, own + vlm.parameters()), (99_880_992, 450_046_176));
}

#[test]
fn what_is_not_read_is_refused_by_key() {
    let directory = PolicyDirectory::open(&Path::new(AT).join("policy")).expect("it is read");
    for (key, value) in [
        ("attention_mode", json!("self_attn")),
        ("adapt_to_pi_aloha", json!(true)),
        ("add_image_special_tokens", json!(true)),
        ("num_expert_layers", json!(2)),
        ("resize_imgs_with_padding", json!(null)),
        ("max_action_dim", json!(3)),
        ("input_features", json!({})),
    ] {
        let mut json = directory.json.clone();
        json[key] = value;
        let changed = PolicyDirectory { json, ..directory.clone() };
        let message = SmolVlaConfig::of(&changed).expect_err(key).to_string();
        assert!(message.contains("config.json") && message.contains(key), "{message}");
    }
    let dir = tempfile::tempdir().expect("a directory for the test");
    fs::write(dir.path().join("config.json"), r#"{"type": "act"}"#).expect("written");
    let message = PolicyDirectory::open(dir.path()).expect_err("another type").to_string();
    assert!(message.contains(r#"`type`: "act"; policies that are read: smolvla"#), "{message}");
}

#[test]
fn frames_and_tasks_become_what_lerobot_makes_of_them() {
    let (expected, (policy, _)) = (Expected::read(), policy());
    let backbone = Path::new(AT).join("vlm");
    let outline = outline(&backbone, &policy.config);
    let form = PromptForm { template: "{task}", images: 2, max_text_tokens: None };
    let prompts =
        SmolVlaPrompts::open(&backbone, &outline, policy.config.most_tokens, &form).expect("it opens");
    let images = SmolVlaImages::of(&outline);
    let batch = Batch::of(&expected, &policy.config);
    let seq = batch.ids.len() / batch.valid.len();
    for (row, task) in expected.about["tasks"].as_array().expect("a list").iter().enumerate() {
        let shapes = vec![images.shape(24, 32).expect("a shape"); 2 - row];
        let ids = prompts.encode(task.as_str().expect("text"), &shapes).expect("it is encoded");
        assert_eq!(ids, batch.ids[row * seq..][..batch.valid[row].len()], "{task}");
    }
    let (shape, bytes) = &expected.tensors["observation.images.camera1"];
    let [height, width] = [shape[2], shape[3]];
    let plane = height * width;
    let pixels =
        (0..plane).flat_map(|at| (0..3).map(move |channel| bytes[channel * plane + at] as u8)).collect();
    let input = images.process(Rgb { height, width, pixels }).expect("it is read");
    assert_eq!(input.pixel_values, *batch.pixels[0]);
}

#[test]
fn a_policy_that_is_written_is_the_one_that_was_trained() {
    let (_, trainables) = policy();
    let directory = PolicyDirectory::open(&Path::new(AT).join("policy")).expect("it is read");
    let dir = tempfile::tempdir().expect("a directory for the test");
    let out = dir.path().join("policy");
    let changed: Vec<f32> = trainables.to_vec().iter().map(|value| value * 0.5).collect();
    let [inputs, outputs] =
        ["input_features", "output_features"].map(|key| directory.features(key).expect("there"));
    let of =
        |mean: f32| BTreeMap::from([("mean".to_owned(), vec![mean; 7]), ("std".to_owned(), vec![2.0; 7])]);
    let statistics = Statistics::from([("action".to_owned(), of(0.5))]);
    let export = Export {
        directory: &directory,
        rules: RULES,
        layout: trainables.layout(),
        values: &changed,
        inputs: &inputs[..2],
        outputs: &outputs,
        statistics: &statistics,
    };
    write(&out, export).expect("it is written");
    let again = PolicyDirectory::open(&out).expect("it is read");
    assert_eq!(again.features("input_features").expect("there"), inputs[..2]);
    let found = again.statistics(PROCESSORS[1], "unnormalizer_processor").expect("they are there");
    assert_eq!(found["action"], MeanStd { mean: vec![0.5; 7], std: vec![2.0; 7] });
    // Half of a bfloat16 number is one.
    assert_eq!(initial_values(&again.dir, trainables.layout()).expect("they are there"), changed);
}
