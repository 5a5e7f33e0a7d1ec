//! Two tiny policies against LeRobot: one training step of each, and a sampled chunk
//! (`integration-tests/fixtures/make_gr00t.py`). The weights of one are a formula.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

use burn::backend::Flex;
use coxswain_models::{
    families::shelf,
    pretrained::{checkpoint::Checkpoint, frozen::frozen_tensors},
};
use coxswain_nn::lora::Lora;
use coxswain_proto::run_spec::Recompute;
use safetensors::{SafeTensors, serialize_to_file};
use serde_json::{Value, json};

use super::{
    nvidia::{BasePolicy, is_base},
    *,
};
use crate::{
    PolicyKind,
    directory::PolicyDirectory,
    export::PROCESSORS,
    golden::{GoldenPolicy, write_weights},
    tuning::TuningSettings,
};

/// As the fixture's adapters were made.
const ADAPTED: &str = concat!(
    r".*(language_model\.layers\..*_proj|visual\.blocks\..*(qkv|proj|linear_fc2)|visual\.merger\.linear_fc1|",
    r"attn1\.(to_q|to_k|to_v|to_out\.0)|ff\.net\.(0\.proj|2)|norm1\.linear|linear_[12]|proj_out_[12])"
);

/// Names and shapes of the tensors in LeRobot's file.
fn tensors(of: &GoldenPolicy) -> Vec<(String, Vec<usize>)> {
    let all = of.about["tensors"].as_object().expect("names and shapes").iter();
    let shape = |value: &Value| serde_json::from_value(value.clone()).expect("a shape");
    // LeRobot stores the table under the head's name; the formula knows it by its own.
    all.map(|(stored, value)| ((RULES.canonical)(stored), shape(value))).collect()
}

/// A golden policy, with its base and, if they are not there, its weights.
fn policy(name: &str) -> GoldenPolicy {
    let policy = GoldenPolicy::new(name, "backbone").copied();
    let base = policy.backbone.with_file_name("base");
    policy.edit("config.json", |config| config["base_model_path"] = json!(base));
    if !policy.dir.join("model.safetensors").exists() {
        write_weights(&policy.dir, &tensors(&policy));
    }
    policy
}

/// The policy for a new embodiment, with all that its base may leave out.
fn plain() -> GoldenPolicy {
    policy("gr00t")
}

/// The other one: for an embodiment that the model knows, with cameras in an order of their own, tasks as
/// they are, pictures that are not cut, values that are not padded, and weights in bfloat16.
fn widowx() -> GoldenPolicy {
    policy("gr00t-widowx")
}

#[test]
fn passes_from_file_to_file_give_what_lerobot_gives() {
    plain().hold_pass();
    widowx().hold_pass();
}

#[test]
fn backbone_and_adapters_have_lerobots_gradients_in_every_mode() {
    for policy in [plain(), widowx()] {
        let backbone = r"backbone\.model\.model\.(visual|language_model\.(layers|embed_tokens))";
        policy.hold_gradients(backbone, ADAPTED);
    }
}

#[test]
fn nvidias_names_give_the_same_bits() {
    let policy = widowx();
    let found = policy.forward(true, &[]);
    let weights = policy.dir.join("model.safetensors");
    let bytes = fs::read(&weights).expect("there");
    let file = SafeTensors::deserialize(&bytes).expect("safetensors");
    let all = file.tensors().into_iter();
    let renamed = all.map(|(name, view)| (name.replacen("_groot_model.", "", 1), view));
    serialize_to_file(renamed, None, &weights).expect("written");
    assert_eq!(policy.forward(true, &[]), found);
}

/// The base of a golden policy as NVIDIA lays it out: its configuration, and weights in two shards.
fn base_of(policy: &GoldenPolicy, dir: &Path) {
    let golden = policy.backbone.with_file_name("base").join("config.json");
    fs::copy(golden, dir.join("config.json")).expect("copied");
    let bytes = fs::read(policy.dir.join("model.safetensors")).expect("there");
    let file = SafeTensors::deserialize(&bytes).expect("safetensors");
    let mut index = json!({"metadata": {}, "weight_map": {}});
    for (number, part) in file.tensors().chunks(file.len().div_ceil(2)).enumerate() {
        let shard = format!("model-{number}.safetensors");
        let named = part.iter().map(|(name, view)| (name.replacen("_groot_model.", "", 1), view));
        let named: Vec<_> = named.collect();
        named.iter().for_each(|(name, _)| index["weight_map"][name] = json!(shard));
        serialize_to_file(named, None, &dir.join(shard)).expect("written");
    }
    fs::write(dir.join("model.safetensors.index.json"), index.to_string()).expect("written");
}

#[test]
fn nvidias_own_directory_becomes_the_one_that_lerobot_makes_of_it() {
    let policy = plain();
    let place = tempfile::tempdir().expect("a directory for the test");
    let (dir, out) = (place.path().join("base"), place.path().join("policy"));
    fs::create_dir(&dir).expect("made");
    base_of(&policy, &dir);
    let golden = PolicyDirectory::from_dir(&policy.dir).expect("it is read");
    let [inputs, outputs] =
        ["input_features", "output_features"].map(|key| golden.features(key).expect("there"));
    let name = &dir.display().to_string();
    let job = BasePolicy { dir: &dir, name, inputs: &inputs, outputs: &outputs };
    job.write(&out).expect("it is made");
    let made = PolicyDirectory::from_dir(&out).expect("it is read");
    for (key, value) in made.json.as_object().expect("an object") {
        assert!(*value == golden.json[key] || key == "base_model_path", "{key}");
    }
    for (file, steps) in PROCESSORS.map(|file| (file, golden.steps(file).expect("there"))) {
        let mut expected = steps;
        for step in expected.iter_mut().filter(|step| step.config.get("image_crop_size").is_some()) {
            (step.config["image_crop_size"], step.config["image_target_size"]) =
                (json!([230, 230]), json!([256, 256]));
        }
        assert_eq!(made.steps(file).expect("there"), expected, "{file}");
    }
    PolicyKind::from_directory(&made).expect("it is a policy");
    let names = |dir: &Path| {
        let checkpoint = Checkpoint::open(dir, RULES).expect("it is read");
        checkpoint.names().map(str::to_owned).collect::<BTreeSet<_>>()
    };
    assert_eq!(names(&out), names(&policy.dir));
    assert!(job.write(&out).is_err(), "it is there");
    assert!(is_base(&dir) && !is_base(&out));
    fs::remove_file(dir.join("model-1.safetensors")).expect("removed");
    let other = place.path().join("other");
    assert!(job.write(&other).is_err() && !other.exists(), "nothing is left");
}

#[test]
fn prompts_and_modules_are_lerobots() {
    for policy in [plain(), widowx()] {
        let case = policy.tuned(TuningSettings::default());
        let images = case.kind.images(&policy.backbone, &case.outline).expect("they are read");
        let shapes = vec![images.shape(24, 36).expect("it fits"); case.kind.sizes().cameras.len()];
        let (shape, ids) = &policy.tensors["tokens"];
        let tasks = policy.about["tasks"].as_array().expect("a list").iter();
        for (task, ids) in tasks.zip(ids.chunks(shape[1])) {
            let found = case.prompts().encode(task.as_str().expect("a text"), &shapes).expect("it fits");
            assert_eq!(found, ids.iter().map(|id| *id as u32).collect::<Vec<_>>(), "{task}");
        }
        // Weights and biases by embodiment have names of their own.
        let called = |name: &str| match name.rsplit_once('.') {
            Some((module, "W")) => format!("{module}.weight"),
            Some((module, "b")) => format!("{module}.bias"),
            _ => name.to_owned(),
        };
        let known = frozen_tensors(RULES, &case.kind.modules(&case.directory, &case.outline)).into_iter();
        let known: BTreeMap<_, _> = known.map(|tensor| (tensor.name, tensor.elements)).collect();
        let stored = tensors(&policy).into_iter();
        let stored: BTreeMap<_, _> =
            stored.map(|(name, shape)| (called(&name), shape.iter().product::<usize>())).collect();
        assert_eq!(known, stored);
        assert_eq!(Some(known.values().sum::<usize>() as u64), policy.about["parameters"].as_u64());
        assert!(Checkpoint::open(&policy.dir, RULES).is_ok());
    }
}

#[test]
fn what_trains_by_each_key_is_what_lerobot_trains() {
    let trained = |policy: &GoldenPolicy| {
        let (_, params) = policy.tuned(TuningSettings::default()).passed(Recompute::None, |_| ());
        Some(params.iter().map(|param| param.len() as u64).sum::<u64>())
    };
    let policy = widowx();
    assert_eq!(trained(&policy), policy.about["trained"].as_u64());
    for (key, count) in policy.about["tuned"].as_object().expect("counts by key") {
        let policy = widowx();
        // The other value of each.
        let other = |value: &Value| value.as_bool().map_or(json!(1), |value| json!(!value));
        policy.edit("config.json", |config| config[key] = other(&config[key]));
        assert_eq!(trained(&policy), count.as_u64(), "{key}");
    }
}

#[test]
fn what_is_not_read_is_refused_by_key() {
    let policy = plain();
    let refused = |file: &str, change: &dyn Fn(&mut Value)| {
        let path = policy.dir.join(file);
        let before = fs::read(&path).expect("there");
        policy.edit(file, change);
        let directory = PolicyDirectory::from_dir(&policy.dir).expect("it is read");
        let message = Gr00tConfig::from_directory(&directory).map(drop).expect_err(file).to_string();
        fs::write(&path, before).expect("written");
        message
    };
    for (key, value) in
        [("use_relative_actions", json!(true)), ("chunk_size", json!(4)), ("max_state_dim", json!(9))]
    {
        let message = refused("config.json", &|config| config[key] = value.clone());
        assert!(message.contains("config.json") && message.contains(key), "{message}");
    }
    for (key, value) in [
        ("raw_stats", json!({"state": {}})),
        ("use_percentiles", json!(true)),
        ("clip_outliers", json!(false)),
        ("video_horizon", json!(2)),
        ("state_dropout_prob", json!(0.1)),
    ] {
        let change = |json: &mut Value| json["steps"][2]["config"][key] = value.clone();
        let message = refused("policy_preprocessor.json", &change);
        assert!(message.contains("policy_preprocessor.json") && message.contains(key), "{message}");
    }
    let change = |json: &mut Value| json["steps"][3]["config"]["use_albumentations"] = json!(true);
    assert!(refused("policy_preprocessor.json", &change).contains("use_albumentations"));
    let change = |json: &mut Value| json["steps"][0]["registry_name"] = json!("groot_n1_7_action_decode_v1");
    assert!(refused("policy_postprocessor.json", &change).contains("groot_n1_7_action_decode_v1"));
    let case = policy.tuned(TuningSettings::default());
    let refused = |lora: Option<&Lora>, train: &[&str]| {
        let train: Vec<String> = train.iter().map(|pattern| (*pattern).to_owned()).collect();
        let asked = TuningSettings { lora, train: &train };
        let tuned = case.kind.tuned(&case.directory, &case.outline, asked);
        tuned.map(drop).expect_err("refused").to_string()
    };
    assert!(refused(Some(&Lora::default()), &[]).contains("lora.targets"));
    for train in ["lm_head", r"language_model\.norm"] {
        let message = refused(None, &[train]);
        assert!(message.contains("model.train"), "{message}");
    }
}

#[test]
fn the_published_policy_has_lerobots_parameters() {
    let policy = plain();
    policy.edit("config.json", |config| {
        // Nowhere: the sizes are the published ones.
        config["base_model_path"] = json!("nobody/none");
        (config["chunk_size"], config["max_state_dim"], config["max_action_dim"]) =
            (json!(40), json!(132), json!(132));
    });
    policy.edit("policy_preprocessor.json", |json| {
        let pack = &mut json["steps"][2]["config"];
        (pack["action_horizon"], pack["valid_action_horizon"]) = (json!(40), json!(40));
        let encode = &mut json["steps"][3]["config"];
        (encode["image_target_size"], encode["image_crop_size"]) = (json!([256, 256]), json!([230, 230]));
    });
    let cosmos = json!({
        "model_type": "qwen3_vl", "tie_word_embeddings": true,
        "text_config": {
            "model_type": "qwen3_vl_text", "hidden_act": "silu", "hidden_size": 2048, "head_dim": 128,
            "intermediate_size": 6144, "num_attention_heads": 16, "num_hidden_layers": 28,
            "num_key_value_heads": 8, "rope_theta": 5_000_000, "vocab_size": 151_936
        },
        "vision_config": {
            "model_type": "qwen3_vl", "hidden_act": "gelu_pytorch_tanh", "depth": 24, "hidden_size": 1024,
            "intermediate_size": 4096, "num_heads": 16, "num_position_embeddings": 2304,
            "out_hidden_size": 2048, "deepstack_visual_indexes": [5, 11, 17]
        }
    });
    let backbone = tempfile::tempdir().expect("a directory for the test");
    fs::write(backbone.path().join("config.json"), cosmos.to_string()).expect("written");
    let directory = PolicyDirectory::from_dir(&policy.dir).expect("it is read");
    let kind = PolicyKind::from_directory(&directory).expect("it is read");
    let outline = kind.outline(&directory, backbone.path(), shelf::<Flex>()).expect("it fits");
    let all = frozen_tensors(RULES, &kind.modules(&directory, &outline));
    assert_eq!(all.iter().map(|tensor| tensor.elements).sum::<usize>(), 3_144_016_000);
    assert_eq!(all.len(), 493 + 537);
    let of_head = all.iter().filter(|tensor| tensor.name.contains("action_head"));
    assert_eq!(of_head.map(|tensor| tensor.elements).sum::<usize>(), 1_620_515_968);
}
