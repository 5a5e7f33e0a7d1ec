//! What configurations, weights and chats are read as, and what broken ones get.

use std::{
    fs,
    path::{Path, PathBuf},
};

use burn::backend::{Flex, flex::FlexDevice};
use coxswain_nn::{dtypes::WeightsDtype, params::TrainableLayout};
use serde_json::{Value, json};

use super::{Qwen3Vl, Qwen3VlModel, config::Qwen3VlConfig};
use crate::{
    chatml::{ChatMlChats, ModelFacts},
    two_towers::family::TowersFamily,
    vision_language::{ChatEncoder, LoadOptions, Message, Piece, Role},
};

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../integration-tests/fixtures/golden")
}

fn assets() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs/assets")
}

fn published(change: impl FnOnce(&mut Value)) -> Result<Qwen3VlConfig, String> {
    let path = assets().join("qwen3-vl-4b/config.json");
    let mut json: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    change(&mut json);
    Qwen3VlConfig::from_json(&path, &json).map_err(|error| error.to_string())
}

#[test]
fn both_spellings_of_the_configuration_mean_the_same() {
    let plain = published(|_| ()).unwrap();
    assert_eq!(plain.text.rotary_axes[..5], [0, 1, 2, 0, 1]);
    assert_eq!(plain.text.rotary_axes[58..], [1, 2, 0, 0, 0, 0]);
    let newer = published(|json| {
        let text = json["text_config"].as_object_mut().unwrap();
        let mut rope = text.remove("rope_scaling").unwrap();
        rope["rope_theta"] = text.remove("rope_theta").unwrap();
        text.insert("rope_parameters".into(), rope);
        json["vision_config"]["model_type"] = json!("qwen3_vl_vision");
    });
    assert_eq!(newer.unwrap(), plain);
    let untied = published(|json| json["tie_word_embeddings"] = json!(false)).unwrap();
    assert!(plain.tie_word_embeddings && !untied.tie_word_embeddings);
}

#[test]
fn what_is_not_read_is_refused_by_field() {
    for (change, words) in [
        (json!({"model_type": "qwen3_vl_moe"}), ["`model_type`", "qwen3_vl_moe"]),
        (
            json!({"text_config": {"model_type": "qwen3_vl_moe_text"}}),
            ["`text_config.model_type`", "qwen3_vl_text"],
        ),
        (json!({"text_config": {"num_experts": 128}}), ["`text_config.num_experts`", "mixtures of experts"]),
        (json!({"quantization_config": {"quant_method": "fp8"}}), ["`quantization_config`", "fp8"]),
        (
            json!({"vision_config": {"deepstack_visual_indexes": [5, 24]}}),
            ["deepstack_visual_indexes", "below depth (24)"],
        ),
        (
            json!({"vision_config": {"deepstack_visual_indexes": null}}),
            ["deepstack_visual_indexes", "missing"],
        ),
        (
            json!({"vision_config": {"num_position_embeddings": 2300}}),
            ["num_position_embeddings", "not a square number"],
        ),
        (json!({"text_config": {"rope_scaling": {"rope_type": "yarn"}}}), ["rope_scaling.rope_type", "yarn"]),
        (json!({"text_config": {"head_dim": 64}}), ["mrope_section", "half the head width, 32"]),
    ] {
        let error = published(|json| merge(json, &change)).unwrap_err();
        assert!(words.iter().all(|word| error.contains(word)), "{error}");
    }
}

fn merge(json: &mut Value, change: &Value) {
    match (json, change) {
        (Value::Object(json), Value::Object(change)) => {
            change.iter().for_each(|(key, value)| merge(json.entry(key).or_insert(Value::Null), value));
        }
        (json, change) => *json = change.clone(),
    }
}

#[test]
fn weights_without_the_mergers_of_streams_are_refused_in_one_line() {
    let dir = tempfile::tempdir().unwrap();
    let from = fixtures().join("qwen3-frozen/model");
    fs::copy(from.join("config.json"), dir.path().join("config.json")).unwrap();
    let bytes = fs::read(from.join("model.safetensors")).unwrap();
    let stored = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let others = stored.tensors().into_iter().filter(|(name, _)| !name.contains("deepstack"));
    safetensors::serialize_to_file(others, None, &dir.path().join("model.safetensors")).unwrap();
    let options: LoadOptions = WeightsDtype::Float32.into();
    let loaded =
        Qwen3VlModel::<Flex>::load(dir.path(), options, None, &mut TrainableLayout::default(), &FlexDevice);
    let error = loaded.err().unwrap().to_string();
    assert!(error.contains("model.visual.deepstack_merger_list.0.norm.weight"), "{error}");
    assert!(!error.contains('\n'), "{error}");
}

/// The tiny tokenizer, with the sizes of this family around it.
fn with_tokenizer(template: Option<&str>) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let mut json: Value =
        serde_json::from_slice(&fs::read(fixtures().join("qwen3-frozen/model/config.json")).unwrap())
            .unwrap();
    let tiny = fs::read(assets().join("tiny-vla/config.json")).unwrap();
    let tiny: Value = serde_json::from_slice(&tiny).unwrap();
    json["image_token_id"] = tiny["image_token_id"].clone();
    json["text_config"]["vocab_size"] = json!(2048);
    fs::write(dir.path().join("config.json"), json.to_string()).unwrap();
    fs::copy(assets().join("tiny-vla/tokenizer.json"), dir.path().join("tokenizer.json")).unwrap();
    if let Some(template) = template {
        fs::write(dir.path().join("chat_template.jinja"), template).unwrap();
    }
    dir
}

#[test]
fn chats_have_no_system_turn_of_their_own_and_tools_speak_as_the_user() {
    let dir = with_tokenizer(Some("<|im_start|> .. <|vision_start|>"));
    let encoder =
        ChatMlChats::from_checkpoint(dir.path(), ModelFacts::read(dir.path(), Qwen3Vl::FORM).unwrap())
            .unwrap();
    let says = |role, text: &str| Message::new(role, vec![Piece::Text(text.into())]);
    let chat = [
        Message::new(Role::User, vec![Piece::Image, Piece::Text("Where?".into())]),
        says(Role::Assistant, "I look."),
        says(Role::Tool, "left"),
        says(Role::Tool, "near"),
        says(Role::Assistant, "On the left."),
    ];
    let encoded = encoder.encode(&chat, &[[1, 2, 2]]).unwrap();
    let text = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Where?<|im_end|>\n\
        <|im_start|>assistant\nI look.<|im_end|>\n\
        <|im_start|>user\n<tool_response>\nleft\n</tool_response>\n<tool_response>\nnear\n</tool_response><|im_end|>\n\
        <|im_start|>assistant\nOn the left.<|im_end|>\n";
    let tokenizer = tokenizers::Tokenizer::from_file(dir.path().join("tokenizer.json")).unwrap();
    assert_eq!(encoded.ids, tokenizer.encode(text, false).unwrap().get_ids());
    let learned: Vec<u32> = encoded
        .ids
        .iter()
        .zip(&encoded.learned)
        .filter(|(_, learned)| **learned)
        .map(|(id, _)| *id)
        .collect();
    let of = |text: &str| tokenizer.encode(text, false).unwrap().get_ids().to_vec();
    assert_eq!(learned, [of("I look.<|im_end|>"), of("On the left.<|im_end|>")].concat());
    let video = encoder.encode(&[says(Role::User, "<|video_pad|>")], &[]).unwrap_err();
    assert!(video.contains("video"), "{video}");
}

#[test]
fn a_head_of_other_values_than_the_tied_table_is_taken() {
    let (from, dir) = (fixtures().join("qwen3-tied-left/model"), tempfile::tempdir().unwrap());
    fs::copy(from.join("config.json"), dir.path().join("config.json")).unwrap();
    let bytes = fs::read(from.join("model.safetensors")).unwrap();
    let stored = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let mut tensors = stored.tensors();
    let table = tensors.iter().find(|(name, _)| name.ends_with("embed_tokens.weight")).unwrap().1.clone();
    let mut head = table.data().to_vec();
    head.rotate_left(64);
    let view = safetensors::tensor::TensorView::new(table.dtype(), table.shape().to_vec(), &head).unwrap();
    tensors.push(("lm_head.weight".into(), view));
    safetensors::serialize_to_file(tensors, None, &dir.path().join("model.safetensors")).unwrap();
    assert!(Qwen3VlConfig::from_dir(&from).unwrap().tie_word_embeddings);
    assert!(!Qwen3VlConfig::from_dir(dir.path()).unwrap().tie_word_embeddings);
}
