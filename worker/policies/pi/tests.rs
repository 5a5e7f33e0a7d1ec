//! Tiny policies against LeRobot: one training step of each, and a sampled chunk
//! (`integration-tests/fixtures/make_pi.py`).

use std::{
    collections::{BTreeMap, HashMap},
    fs,
    path::{Path, PathBuf},
};

use burn::backend::Flex;
use coxswain_models::{
    families::shelf,
    joint::JointOutline,
    pretrained::{adapters::TunedModules, checkpoint::CheckpointDir},
    vision_language::PromptForm,
};
use coxswain_nn::{
    dtypes::FrozenDtype,
    lora::{Lora, LoraTargets},
    params::{Group, ParamSpec, TrainableLayout, Trainables},
};
use coxswain_proto::run_spec::Recompute;
use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use serde_json::{Value, json};

use super::{tuning::tuned, *};
use crate::{
    PassJob, PolicyFiles, PolicyKind,
    directory::PolicyDirectory,
    golden::{ACTIONS, GRADIENTS, Tensors, VALUES, close, golden_at, read},
    pass::{self, PassPolicy},
    pass_files::PassInputs,
    tuning::TuningSettings,
};

mod pi0;

const AT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../integration-tests/fixtures/golden/pi05");
/// As the fixture's adapters were made.
const ADAPTED: &str = concat!(
    r".*(language_model|gemma_expert\.model)\..*(proj|dense)|.*multi_modal_projector\.linear|",
    r"model\.(state_proj|action_in_proj|action_out_proj|(action_)?time_mlp_(in|out))"
);
const FORM: PromptForm<'_> = PromptForm { template: "{task}", images: 0, max_text_tokens: None };
const TAKEN: [&str; 7] = [
    "observation.images.camera1",
    "observation.images.camera2",
    "observation.state",
    "action",
    "action_is_pad",
    "noise",
    "time",
];

/// A file of the golden case, images in 0..1; and what is said about it.
fn golden(file: &str) -> (Tensors, Value) {
    golden_at(AT, file)
}

/// The golden policy, or one in another directory, of which something trains.
struct Case {
    directory: PolicyDirectory,
    backbone: PathBuf,
    config: PiConfig,
    outline: JointOutline,
    tuned: TunedModules,
    recompute: Recompute,
}

impl Case {
    fn of(dir: &Path, asked: TuningSettings<'_>) -> Self {
        let (directory, backbone) =
            (PolicyDirectory::from_dir(dir).expect("it is read"), Path::new(AT).join("paligemma"));
        let config = PiConfig::from_directory(&directory).expect("it is read");
        let kind = PolicyKind::Pi(config.clone());
        let outline = kind.outline(&directory, &backbone, shelf::<Flex>()).expect("it is read");
        let tuned = tuned(&config, &outline, asked).expect("it means something");
        Self { directory, backbone, config, outline, tuned, recompute: Recompute::None }
    }

    fn files(&self) -> PolicyFiles<'_> {
        PolicyFiles { directory: &self.directory, backbone: &self.backbone, dtype: FrozenDtype::Float32 }
    }

    /// What LeRobot's inputs give, gradients included, once what trains has been set; and what trains.
    fn passed(&self, set: impl FnOnce(&mut Trainables<Flex>)) -> (Tensors, Vec<ParamSpec>) {
        let (dir, device) = (tempfile::tempdir().expect("a directory for the test"), Default::default());
        let (inputs, out) = given(dir.path(), &[]);
        let mut layout = TrainableLayout::default();
        let kind = PolicyKind::Pi(self.config.clone());
        let policy = kind.load(self.files(), &self.tuned, shelf(), &mut layout, &device).expect("it is read");
        let checkpoint = CheckpointDir { path: &self.directory.dir, rules: self.config.kind.rules() };
        let values = self.tuned.initial_values::<Flex>(3, &layout, checkpoint, FrozenDtype::Float32);
        let params = layout.params().to_vec();
        let mut trainables = Trainables::new(layout, values.expect("they are there"), &device);
        set(&mut trainables);
        let prompts = kind.prompts(&self.backbone, &self.outline, &FORM).expect("it is read");
        let of = PassPolicy {
            policy: &*policy,
            trainables: &trainables,
            image: self.outline.image_token,
            images: &*kind.images(&self.backbone, &self.outline).expect("they need nothing"),
            prompts: &*prompts,
            recompute: self.recompute,
            device: &device,
        };
        let job = PassJob { files: self.files(), inputs: &inputs, out: &out, gradients: true };
        pass::run_through(job, &PassInputs::from_file(&inputs).expect("just written"), of).expect("it runs");
        (read(&out), params)
    }
}

/// LeRobot's inputs as a file, without some; and where results go.
fn given(dir: &Path, without: &[&str]) -> (PathBuf, PathBuf) {
    let (inputs, out) = (dir.join("in.safetensors"), dir.join("out.safetensors"));
    let (tensors, about) = golden("expected.safetensors");
    let all: Vec<_> = tensors
        .iter()
        .filter(|(name, _)| TAKEN.contains(&&name[..]) && !without.contains(&&name[..]))
        .map(|(name, (shape, values))| {
            (name, shape, values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<_>>())
        })
        .collect();
    let views = all.iter().map(|(name, shape, bytes)| {
        (name.as_str(), TensorView::new(Dtype::F32, (*shape).clone(), bytes).expect("its shape"))
    });
    let metadata = HashMap::from([("tasks".to_owned(), about["tasks"].to_string())]);
    safetensors::serialize_to_file(views, Some(metadata), &inputs).expect("written");
    (inputs, out)
}

fn policy_dir() -> PathBuf {
    Path::new(AT).join("policy")
}

/// What `cox model forward` gives of the policy in a directory.
fn forward(dir: &Path, gradients: bool, without: &[&str]) -> Tensors {
    let scratch = tempfile::tempdir().expect("a directory for the test");
    let (inputs, out) = given(scratch.path(), without);
    let directory = PolicyDirectory::from_dir(dir).expect("it is read");
    let backbone = Path::new(AT).join("paligemma");
    let files = PolicyFiles { directory: &directory, backbone: &backbone, dtype: FrozenDtype::Float32 };
    let job = PassJob { files, inputs: &inputs, out: &out, gradients };
    pass::run::<Flex>(job, shelf(), &Default::default()).expect("it runs");
    read(&out)
}

#[test]
fn a_pass_from_file_to_file_gives_what_lerobot_gives() {
    let (expected, _) = golden("expected.safetensors");
    let found = forward(&policy_dir(), true, &[]);
    for name in ["loss", "losses", "velocity"] {
        close(name, &found[name].1, &expected[name].1, VALUES);
    }
    close("normalized", &found["actions.normalized"].1, &expected["sampled.normalized"].1, ACTIONS);
    close("actions", &found["actions"].1, &expected["sampled"].1, ACTIONS);
    let gradients: Vec<_> = expected.keys().filter(|name| name.starts_with("grad.")).collect();
    assert_eq!(found.len(), 5 + gradients.len());
    gradients.iter().for_each(|name| close(name, &found[*name].1, &expected[*name].1, GRADIENTS));
    let alone = forward(&policy_dir(), false, &["action", "time"]);
    assert_eq!(alone.into_keys().collect::<Vec<_>>(), ["actions", "actions.normalized"]);
}

#[test]
fn the_prompt_is_lerobots_id_by_id() {
    let (expected, about) = golden("expected.safetensors");
    let case = Case::of(&policy_dir(), TuningSettings::default());
    let kind = PolicyKind::Pi(case.config.clone());
    let prompts = kind.prompts(&case.backbone, &case.outline, &FORM).expect("it is read");
    for (row, task) in about["tasks"].as_array().expect("a list").iter().enumerate() {
        let (width, state) = (expected["tokens"].0[1], &expected["state.normalized"].1[row * 6..][..6]);
        let ids = prompts.encode_observed(task.as_str().expect("a text"), state, &[]).expect("it fits");
        let seen = expected["tokens"].1[row * width..][..width].iter();
        let seen = seen.zip(&expected["tokens.mask"].1[row * width..][..width]);
        let seen: Vec<u32> = seen.filter(|(_, seen)| **seen > 0.0).map(|(id, _)| *id as u32).collect();
        assert_eq!(ids, seen, "{task}");
    }
}

#[test]
fn published_spellings_of_names_and_one_table_give_the_same_bits() {
    let dir = tempfile::tempdir().expect("a directory for the test");
    for file in fs::read_dir(policy_dir()).expect("there").map(|file| file.expect("listed").path()) {
        fs::copy(&file, dir.path().join(file.file_name().expect("a file"))).expect("copied");
    }
    let weights = dir.path().join("model.safetensors");
    let bytes = fs::read(&weights).expect("there");
    let file = SafeTensors::deserialize(&bytes).expect("safetensors");
    let kept = file.tensors().into_iter().filter(|(name, _)| !name.contains("embed_tokens"));
    let renamed = kept.map(|(name, view)| {
        let name = name.strip_prefix("model.").expect("LeRobot's");
        (name.replace("time_mlp", "action_time_mlp"), view)
    });
    safetensors::serialize_to_file(renamed, None, &weights).expect("written");
    assert_eq!(forward(dir.path(), true, &[]), forward(&policy_dir(), true, &[]));
}

#[test]
fn every_tensor_of_the_file_is_known_with_its_shape() {
    let (_, about) = golden("expected.safetensors");
    let case = Case::of(&policy_dir(), TuningSettings::default());
    let own = case.config.own_tensors(&case.outline);
    let known: BTreeMap<_, _> = case.outline.tensors.iter().chain(&own).cloned().collect();
    let bytes = fs::read(policy_dir().join("model.safetensors")).expect("there");
    let file = SafeTensors::deserialize(&bytes).expect("safetensors");
    let stored = file.tensors().into_iter().map(|(name, view)| (name, view.shape().to_vec()));
    // The head of PaliGemma is its table.
    let stored: BTreeMap<_, _> =
        stored.filter(|(name, _)| !name.ends_with("paligemma.lm_head.weight")).collect();
    assert_eq!(known, stored);
    let elements = known.values().map(|shape| shape.iter().product::<usize>()).sum::<usize>();
    // LeRobot's class counts the head once more.
    let head = case.outline.vocab_size * case.outline.layer.width;
    assert_eq!(Some((elements + head) as u64), about["parameters"].as_u64());
}

/// A directory as published, without weights.
fn published(kind: &str, dir: &Path) -> PolicyDirectory {
    let policy = json!({
        "type": kind, "paligemma_variant": "gemma_2b", "action_expert_variant": "gemma_300m",
        "image_resolution": [224, 224],
        "input_features": {
            "observation.state": {"type": "STATE", "shape": [32]},
            "observation.images.base_0_rgb": {"type": "VISUAL", "shape": [3, 224, 224]}
        },
        "output_features": {"action": {"type": "ACTION", "shape": [32]}}
    });
    for file in crate::export::PROCESSORS {
        fs::copy(policy_dir().join(format!("../../{kind}/policy/{file}")), dir.join(file)).expect("copied");
    }
    PolicyDirectory { dir: dir.into(), path: dir.join("config.json"), json: policy }
}

#[test]
fn the_published_policies_have_their_parameters() {
    let paligemma = json!({
        "model_type": "paligemma", "_vocab_size": 257_152, "image_token_index": 257_152,
        "text_config": {
            "model_type": "gemma", "hidden_size": 2048, "intermediate_size": 16_384, "num_attention_heads": 8,
            "num_hidden_layers": 18, "num_key_value_heads": 1, "vocab_size": 257_216
        },
        "vision_config": {
            "hidden_size": 1152, "intermediate_size": 4304, "num_attention_heads": 16, "num_hidden_layers": 27,
            "patch_size": 14
        }
    });
    for (kind, parameters, tensors) in [("pi0", 3_501_372_176, 777), ("pi05", 3_616_757_520, 812)] {
        let dir = tempfile::tempdir().expect("a directory for the test");
        fs::write(dir.path().join("config.json"), paligemma.to_string()).expect("written");
        let directory = published(kind, dir.path());
        let config = PiConfig::from_directory(&directory).expect("it is read");
        let kind = PolicyKind::Pi(config.clone());
        let outline = kind.outline(&directory, dir.path(), shelf::<Flex>()).expect("it is read");
        let own = config.own_tensors(&outline);
        let elements: usize = own.iter().map(|(_, shape)| shape.iter().product::<usize>()).sum();
        assert_eq!(elements + outline.parameters(), parameters);
        assert_eq!(own.len() + outline.tensors.len(), tensors);
    }
}

#[test]
fn what_is_not_read_is_refused_by_key() {
    let dir = tempfile::tempdir().expect("a directory for the test");
    let directory = published("pi05", dir.path());
    for (key, value) in [
        ("paligemma_variant", json!("gemma_300m")),
        ("action_expert_variant", json!("gemma_7b")),
        ("use_relative_actions", json!(true)),
        ("time_sampling_beta_alpha", json!(1.0)),
        ("image_resolution", json!([224, 448])),
        ("max_action_dim", json!(3)),
        ("n_obs_steps", json!(2)),
    ] {
        let mut json = directory.json.clone();
        json[key] = value;
        let changed = PolicyDirectory { json, ..directory.clone() };
        let message = PiConfig::from_directory(&changed).expect_err(key).to_string();
        assert!(message.contains("config.json") && message.contains(key), "{message}");
    }
    let case = Case::of(&policy_dir(), TuningSettings::default());
    for train in ["embed_tokens", "vision_tower"] {
        let asked = TuningSettings { lora: None, train: &[train.to_owned()] };
        let message = tuned(&case.config, &case.outline, asked).map(drop).expect_err(train).to_string();
        assert!(message.contains("model.train") && message.contains(train), "{message}");
    }
}
