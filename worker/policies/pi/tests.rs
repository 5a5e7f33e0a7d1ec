//! Tiny policies against LeRobot: one training step of each, and a sampled chunk
//! (`integration-tests/fixtures/make_pi.py`).

use std::{collections::BTreeMap, fs, path::Path};

use burn::backend::Flex;
use coxswain_models::families::shelf;
use safetensors::SafeTensors;
use serde_json::json;

use super::*;
use crate::{PolicyKind, directory::PolicyDirectory, golden::GoldenPolicy, tuning::TuningSettings};

/// As the fixture's adapters were made.
const ADAPTED: &str = concat!(
    r".*(language_model|gemma_expert\.model)\..*(proj|dense)|.*multi_modal_projector\.linear|",
    r"model\.(state_proj|action_in_proj|action_out_proj|(action_)?time_mlp_(in|out))"
);

/// Both golden policies; they have one backbone.
fn policies() -> [GoldenPolicy; 2] {
    ["pi05", "pi0"].map(|name| GoldenPolicy::new(name, "../pi05/paligemma"))
}

#[test]
fn passes_from_file_to_file_give_what_lerobot_gives() {
    policies().iter().for_each(GoldenPolicy::hold_pass);
}

#[test]
fn language_model_and_adapters_have_lerobots_gradients_in_every_mode() {
    for policy in policies() {
        policy.hold_gradients(r"paligemma\.model\.(language_model\.layers|multi_modal_projector)", ADAPTED);
    }
}

#[test]
fn prompts_are_lerobots_id_by_id() {
    for policy in policies() {
        let prompts = policy.tuned(TuningSettings::default()).prompts();
        let width = policy.tensors["tokens"].0[1];
        for (row, task) in policy.about["tasks"].as_array().expect("a list").iter().enumerate() {
            let state = &policy.values("state.normalized")[row * 6..][..6];
            let ids = prompts.encode_observed(task.as_str().expect("a text"), state, &[]).expect("it fits");
            let seen = policy.values("tokens")[row * width..][..width].iter();
            let seen = seen.zip(&policy.values("tokens.mask")[row * width..][..width]);
            let seen: Vec<u32> = seen.filter(|(_, seen)| **seen > 0.0).map(|(id, _)| *id as u32).collect();
            assert_eq!(ids, seen, "{task}");
        }
    }
}

#[test]
fn published_spellings_of_names_and_one_table_give_the_same_bits() {
    let [from, to] = ["time_mlp", "action_time_mlp"];
    for (policy, [from, to]) in policies().into_iter().zip([[from, to], [to, from]]) {
        let (found, policy) = (policy.forward(true, &[]), policy.copied());
        let weights = policy.dir.join("model.safetensors");
        let bytes = fs::read(&weights).expect("there");
        let file = SafeTensors::deserialize(&bytes).expect("safetensors");
        let kept = file.tensors().into_iter().filter(|(name, _)| !name.contains("embed_tokens"));
        let renamed = kept.map(|(name, view)| {
            let name = name.strip_prefix("model.").expect("LeRobot's");
            (name.replace(from, to), view)
        });
        safetensors::serialize_to_file(renamed, None, &weights).expect("written");
        assert_eq!(policy.forward(true, &[]), found);
    }
}

#[test]
fn every_tensor_of_the_files_is_known_with_its_shape() {
    for policy in policies() {
        let case = policy.tuned(TuningSettings::default());
        let config = PiConfig::from_directory(&case.directory).expect("it is read");
        let own = config.own_tensors(&case.outline);
        let known: BTreeMap<_, _> = case.outline.tensors.iter().chain(&own).cloned().collect();
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
        fs::copy(GoldenPolicy::new(kind, "").dir.join(file), dir.join(file)).expect("copied");
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
    let [policy, _] = policies();
    let case = policy.tuned(TuningSettings::default());
    for train in ["embed_tokens", "vision_tower"] {
        let asked = TuningSettings { lora: None, train: &[train.to_owned()] };
        let tuned = case.kind.tuned(&case.directory, &case.outline, asked);
        let message = tuned.map(drop).expect_err(train).to_string();
        assert!(message.contains("model.train") && message.contains(train), "{message}");
    }
}
