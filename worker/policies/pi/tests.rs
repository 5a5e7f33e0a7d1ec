//! Tiny policies against LeRobot: one training step of each, and a sampled chunk
//! (`integration-tests/fixtures/make_pi.py`).

use std::{collections::BTreeMap, fs, path::Path};

use burn::backend::Flex;
use coxswain_models::families::shelf;
use safetensors::SafeTensors;
use serde_json::json;

use super::*;
use crate::{
    PolicyKind,
    directory::PolicyDirectory,
    golden::{GRADIENTS, GoldenPolicy, TunedGolden, close, gradients, hold, write_weights},
    tuning::TuningSettings,
};

mod pi0;

/// As the fixture's adapters were made.
const ADAPTED: &str = concat!(
    r".*(language_model|gemma_expert\.model)\..*(proj|dense)|.*multi_modal_projector\.linear|",
    r"model\.(state_proj|action_in_proj|action_out_proj|(action_)?time_mlp_(in|out))"
);

fn pi05() -> GoldenPolicy {
    GoldenPolicy::new("pi05", "paligemma", &["gradients.safetensors", "expected.safetensors"])
}

/// Names and shapes of all that is read, beside a model's outline.
fn tensors(of: &TunedGolden<'_>) -> Vec<(String, Vec<usize>)> {
    let PolicyKind::Pi(config) = &of.kind else { panic!("a policy of another kind") };
    [&of.outline.tensors[..], &config.own_tensors(&of.outline)].concat()
}

#[test]
fn a_pass_from_file_to_file_gives_what_lerobot_gives() {
    let policy = pi05();
    let found = policy.hold_pass();
    let there = policy.tensors.keys().filter(|name| name.starts_with("grad.")).count();
    assert_eq!(gradients(&found).count(), there);
    for name in gradients(&found).map(|name| format!("grad.{name}")) {
        close(&name, &found[&name].1, &policy.tensors[&name].1, GRADIENTS);
    }
}

#[test]
fn language_model_and_adapters_have_lerobots_gradients_in_every_mode() {
    for policy in [pi05(), pi0::policy()] {
        policy.hold_gradients(r"paligemma\.model\.(language_model\.layers|multi_modal_projector)", ADAPTED);
    }
}

#[test]
fn the_prompt_is_lerobots_id_by_id() {
    let policy = pi05();
    let (expected, about) = (&policy.tensors, &policy.about);
    let prompts = policy.tuned(TuningSettings::default()).prompts();
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
    let policy = pi05().copied();
    let weights = policy.dir.join("model.safetensors");
    let bytes = fs::read(&weights).expect("there");
    let file = SafeTensors::deserialize(&bytes).expect("safetensors");
    let kept = file.tensors().into_iter().filter(|(name, _)| !name.contains("embed_tokens"));
    let renamed = kept.map(|(name, view)| {
        let name = name.strip_prefix("model.").expect("LeRobot's");
        (name.replace("time_mlp", "action_time_mlp"), view)
    });
    safetensors::serialize_to_file(renamed, None, &weights).expect("written");
    assert_eq!(policy.forward(true, &[]), pi05().forward(true, &[]));
}

#[test]
fn every_tensor_of_the_file_is_known_with_its_shape() {
    let policy = pi05();
    let case = policy.tuned(TuningSettings::default());
    let known: BTreeMap<_, _> = tensors(&case).into_iter().collect();
    let bytes = fs::read(policy.dir.join("model.safetensors")).expect("there");
    let file = SafeTensors::deserialize(&bytes).expect("safetensors");
    let stored = file.tensors().into_iter().map(|(name, view)| (name, view.shape().to_vec()));
    // The head of PaliGemma is its table.
    let stored: BTreeMap<_, _> =
        stored.filter(|(name, _)| !name.ends_with("paligemma.lm_head.weight")).collect();
    assert_eq!(known, stored);
    let elements = known.values().map(|shape| shape.iter().product::<usize>()).sum::<usize>();
    // LeRobot's class counts the head once more.
    let head = case.outline.vocab_size * case.outline.layer.width;
    assert_eq!(Some((elements + head) as u64), policy.about["parameters"].as_u64());
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
        let golden = GoldenPolicy::new(kind, "", &[]);
        fs::copy(golden.dir.join(file), dir.join(file)).expect("copied");
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
    let policy = pi05();
    let case = policy.tuned(TuningSettings::default());
    for train in ["embed_tokens", "vision_tower"] {
        let asked = TuningSettings { lora: None, train: &[train.to_owned()] };
        let tuned = case.kind.tuned(&case.directory, &case.outline, asked);
        let message = tuned.map(drop).expect_err(train).to_string();
        assert!(message.contains("model.train") && message.contains(train), "{message}");
    }
}
