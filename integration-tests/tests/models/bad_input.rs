//! What a broken checkpoint, adapter or input file gets: an error that names file, field and remedy.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

use std::{
    fs,
    path::{Path, PathBuf},
};

use burn_flex::Flex;
use coxswain_models::{
    families::qwen2_5_vl::Qwen2_5Vl, pretrained::job::ForwardJob, vision_language::VlFamilyOn,
};
use coxswain_nn::dtypes::FrozenDtype;
use serde_json::{Value, json};
use tempfile::TempDir;

const CASE: &str = "flat-gqa-left";

/// A copy of a golden case that a test may break.
struct Copy(TempDir);

impl Copy {
    fn new(case: &str) -> Self {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/golden").join(case);
        let copy = tempfile::tempdir().unwrap();
        for part in ["", "model", "adapter"] {
            fs::create_dir_all(copy.path().join(part)).unwrap();
            let Ok(entries) = fs::read_dir(source.join(part)) else { continue };
            for entry in entries.map(Result::unwrap).filter(|e| e.file_type().unwrap().is_file()) {
                fs::copy(entry.path(), copy.path().join(part).join(entry.file_name())).unwrap();
            }
        }
        Self(copy)
    }

    fn path(&self, part: &str) -> PathBuf {
        self.0.path().join(part)
    }

    fn edit_json(&self, part: &str, edit: impl FnOnce(&mut Value)) {
        let mut value = serde_json::from_str(&fs::read_to_string(self.path(part)).unwrap()).unwrap();
        edit(&mut value);
        fs::write(self.path(part), value.to_string()).unwrap();
    }

    fn edit_bytes(&self, part: &str, edit: impl FnOnce(&mut Vec<u8>)) {
        let mut bytes = fs::read(self.path(part)).unwrap();
        edit(&mut bytes);
        fs::write(self.path(part), bytes).unwrap();
    }

    /// Edits the header of a safetensors file, which is JSON; the data stays.
    fn edit_header(&self, part: &str, edit: impl FnOnce(&mut Value)) {
        self.edit_bytes(part, |bytes| {
            let len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
            let mut header = serde_json::from_slice(&bytes[8..8 + len]).unwrap();
            edit(&mut header);
            let mut text = header.to_string().into_bytes();
            text.resize(text.len().next_multiple_of(8), b' ');
            let data = bytes.split_off(8 + len);
            *bytes = (text.len() as u64).to_le_bytes().into_iter().chain(text).chain(data).collect();
        });
    }

    /// The error of a forward pass; nothing may have been written.
    fn error(&self, adapter: bool) -> String {
        self.error_in(adapter, FrozenDtype::Float32)
    }

    /// The error of a forward pass with weights kept as `dtype`; nothing may have been written.
    fn error_in(&self, adapter: bool, dtype: FrozenDtype) -> String {
        let adapter_dir = self.path("adapter");
        let out = self.path("out.safetensors");
        let job = ForwardJob {
            model: &self.path("model"),
            adapter: adapter.then_some(adapter_dir.as_path()),
            inputs: &self.path("inputs.safetensors"),
            out: &out,
            dtype,
        };
        let error = VlFamilyOn::<Flex>::forward(&Qwen2_5Vl, &job, &Default::default())
            .expect_err("the input is broken");
        assert!(!out.exists(), "a failed pass must write nothing");
        error.to_string()
    }

    #[track_caller]
    fn expect(&self, adapter: bool, parts: &[&str]) {
        let error = self.error(adapter);
        for part in parts {
            assert!(error.contains(part), "{error:?} lacks {part:?}");
        }
    }
}

#[test]
fn a_weight_that_is_no_number_is_not_quantized() {
    let (copy, name) = (Copy::new("nf4"), "model.layers.0.self_attn.q_proj.weight");
    copy.edit_bytes("model/model.safetensors", |bytes| {
        let data = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let header: Value = serde_json::from_slice(&bytes[8..data]).unwrap();
        let at = data + header[name]["data_offsets"][0].as_u64().unwrap() as usize;
        // A bfloat16 that is none.
        bytes[at..at + 2].copy_from_slice(&[0xc0, 0x7f]);
    });
    for dtype in [FrozenDtype::Nf4, FrozenDtype::Int8] {
        let error = copy.error_in(false, dtype);
        assert!(error.contains(name) && error.contains("holds values that are not finite"), "{error}");
    }
}

fn broken_config(edit: impl FnOnce(&mut Value), parts: &[&str]) {
    let copy = Copy::new(CASE);
    copy.edit_json("model/config.json", edit);
    copy.expect(false, &[&["config.json"], parts].concat());
}

#[test]
fn a_config_that_contradicts_itself_names_the_field() {
    broken_config(|c| c["num_attention_heads"] = json!(5), &["`num_attention_heads`", "5", "hidden_size 32"]);
    broken_config(
        |c| c["num_key_value_heads"] = json!(3),
        &["`num_key_value_heads`", "3", "num_attention_heads 4"],
    );
    broken_config(
        |c| c["rope_scaling"]["mrope_section"] = json!([1, 1, 1]),
        &["`rope_scaling.mrope_section`", "[1, 1, 1]", "4"],
    );
    broken_config(
        |c| c["vision_config"]["out_hidden_size"] = json!(64),
        &["`vision_config.out_hidden_size`", "64", "32"],
    );
    broken_config(
        |c| c["vision_config"]["fullatt_block_indexes"] = json!([1, 3]),
        &["`vision_config.fullatt_block_indexes`", "block 3"],
    );
    broken_config(
        |c| c["vision_config"]["in_channels"] = json!(1),
        &["`vision_config.in_channels`", "in_chans"],
    );
    broken_config(|c| c["image_token_id"] = json!(96), &["`image_token_id`", "96"]);
    broken_config(
        |c| c["text_config"] = json!({"hidden_size": 64}),
        &["`hidden_size`", "32", "text_config.hidden_size", "64"],
    );
    broken_config(|c| c["head_dim"] = json!(16), &["`head_dim`", "16", "8"]);
}

#[test]
fn a_config_that_asks_for_what_is_not_supported_names_the_field() {
    broken_config(|c| c["model_type"] = json!("qwen3_vl"), &["`model_type`", "qwen3_vl", "qwen2_5_vl"]);
    broken_config(|c| c["hidden_act"] = json!("gelu"), &["`hidden_act`", "gelu"]);
    broken_config(|c| c["rope_scaling"]["type"] = json!("yarn"), &["`rope_scaling.type`", "yarn"]);
    broken_config(
        |c| {
            c["use_sliding_window"] = json!(true);
            c["max_window_layers"] = json!(1)
        },
        &["`use_sliding_window`"],
    );
}

#[test]
fn a_config_with_missing_or_mistyped_sizes_names_the_field() {
    broken_config(
        |c| {
            c.as_object_mut().unwrap().remove("intermediate_size");
        },
        &["`intermediate_size`", "missing"],
    );
    broken_config(
        |c| {
            c.as_object_mut().unwrap().remove("vision_config");
        },
        &["`vision_config`", "missing"],
    );
    broken_config(|c| c["hidden_size"] = json!("large"), &["`hidden_size`", "large", "whole number"]);
    broken_config(|c| c["vocab_size"] = json!(0), &["`vocab_size`", "positive"]);
    let copy = Copy::new(CASE);
    fs::write(copy.path("model/config.json"), "{\"model_type\": ").unwrap();
    copy.expect(false, &["config.json", "not valid JSON", "line 1"]);
    fs::remove_file(copy.path("model/config.json")).unwrap();
    copy.expect(false, &["config.json", "Hugging Face directory"]);
}

#[test]
fn weights_that_contradict_the_config_name_tensor_and_shapes() {
    let copy = Copy::new(CASE);
    copy.edit_json("model/config.json", |c| c["intermediate_size"] = json!(40));
    copy.expect(false, &["model.safetensors", "mlp.gate_proj.weight", "[48, 32]", "[40, 32]"]);
    let copy = Copy::new(CASE);
    copy.edit_json("model/config.json", |c| c["num_hidden_layers"] = json!(4));
    copy.expect(
        false,
        &["model", "model.language_model.layers.3.input_layernorm.weight", "[32]", "shard is missing"],
    );
    let copy = Copy::new(CASE);
    copy.edit_header("model/model.safetensors", |h| {
        let tensor = h.as_object_mut().unwrap().remove("lm_head.weight").unwrap();
        h["head.weight"] = tensor;
    });
    copy.expect(false, &["lm_head.weight", "[96, 32]"]);
}

#[test]
fn garbled_weight_files_are_named() {
    let weights = "model/model.safetensors";
    let copy = Copy::new(CASE);
    copy.edit_bytes(weights, |bytes| bytes.truncate(bytes.len() - 100));
    copy.expect(false, &["model.safetensors", "truncated", "again"]);
    copy.edit_bytes(weights, |bytes| bytes.truncate(4));
    copy.expect(false, &["model.safetensors", "4 bytes", "truncated"]);
    fs::write(copy.path(weights), "version https://git-lfs.github.com/spec/v1\noid sha256:0\n").unwrap();
    copy.expect(false, &["model.safetensors", "Git LFS"]);
    fs::write(copy.path(weights), "").unwrap();
    copy.expect(false, &["model.safetensors", "0 bytes"]);
    fs::remove_file(copy.path(weights)).unwrap();
    copy.expect(false, &["model.safetensors", "index.json"]);
    let copy = Copy::new(CASE);
    copy.edit_header(weights, |h| {
        let bias = &mut h["model.layers.0.self_attn.q_proj.bias"];
        bias["dtype"] = json!("I32");
    });
    copy.expect(false, &["q_proj.bias", "I32", "BF16"]);
}

#[test]
fn a_missing_shard_is_named() {
    let copy = Copy::new("mqa-sharded-bf16");
    let index: Value =
        serde_json::from_str(&fs::read_to_string(copy.path("model/model.safetensors.index.json")).unwrap())
            .unwrap();
    let shard = index["weight_map"]["model.norm.weight"].as_str().unwrap();
    fs::remove_file(copy.path("model").join(shard)).unwrap();
    copy.expect(false, &[shard, "index.json"]);
    copy.edit_json("model/model.safetensors.index.json", |i| {
        i["weight_map"]["model.norm.weight"] = json!("../x")
    });
    copy.expect(false, &["index.json", "weight_map.model.norm.weight", "../x"]);
}

fn broken_adapter(edit: impl FnOnce(&mut Value), parts: &[&str]) {
    let copy = Copy::new(CASE);
    copy.edit_json("adapter/adapter_config.json", edit);
    copy.expect(true, parts);
}

#[test]
fn adapters_that_are_not_plain_lora_are_refused_by_field() {
    let file = "adapter_config.json";
    broken_adapter(|c| c["use_qalora"] = json!(true), &[file, "`use_qalora`", "plain LoRA"]);
    broken_adapter(|c| c["bias"] = json!("some"), &[file, "`bias`", "\"some\"", "lora_only"]);
    broken_adapter(|c| c["bias"] = json!("lora_only"), &["`bias`", "no tensor `model.", ".bias`"]);
    broken_adapter(
        |c| c["modules_to_save"] = json!(["lm_head"]),
        &[file, "no tensor", "lm_head", "modules_to_save"],
    );
    broken_adapter(|c| c["peft_type"] = json!("LOHA"), &[file, "`peft_type`", "LOHA"]);
    broken_adapter(
        |c| c["init_lora_weights"] = json!("pissa_niter_4"),
        &[file, "`init_lora_weights`", "pissa"],
    );
    broken_adapter(|c| c["r"] = json!(0), &[file, "`r`", "0"]);
    broken_adapter(|c| c["target_modules"] = json!(null), &[file, "`target_modules`", "missing"]);
    broken_adapter(
        |c| c["target_modules"] = json!("(q_proj"),
        &["target_modules", "(q_proj", "regular expression"],
    );
}

#[test]
fn an_adapter_whose_files_disagree_names_the_tensor() {
    broken_adapter(
        |c| c["r"] = json!(5),
        &["adapter_model.safetensors", "lora_A.weight", "[4, ", "rank 5", "`r`"],
    );
    broken_adapter(
        |c| c["target_modules"] = json!(["q_proj"]),
        &["adapter_model.safetensors", "does not target"],
    );
    broken_adapter(
        |c| c["target_modules"].as_array_mut().unwrap().push(json!("down_proj")),
        &["adapter_model.safetensors", "down_proj", "targets that module"],
    );
    broken_adapter(|c| c["target_modules"] = json!(["q_prj"]), &["q_prj", "did you mean \"q_proj\"?"]);
    broken_adapter(|c| c["target_modules"] = json!("q_proj"), &["did you mean the list [\"q_proj\"]?"]);
    broken_adapter(|c| c["exclude_modules"] = json!(".*"), &["exclude_modules", "leave no linear layer"]);
    let copy = Copy::new(CASE);
    // The last value of the last tensor.
    copy.edit_bytes("adapter/adapter_model.safetensors", |bytes| {
        let start = bytes.len() - 4;
        bytes[start..].copy_from_slice(&f32::NAN.to_le_bytes());
    });
    copy.expect(true, &["adapter_model.safetensors", "holds NaN", "use an earlier checkpoint"]);
    copy.edit_bytes("adapter/adapter_model.safetensors", |bytes| bytes.truncate(bytes.len() / 2));
    copy.expect(true, &["adapter_model.safetensors", "truncated"]);
    copy.edit_bytes("adapter/adapter_model.safetensors", |bytes| bytes.clear());
    fs::remove_file(copy.path("adapter/adapter_config.json")).unwrap();
    copy.expect(true, &["adapter_config.json", "save_pretrained"]);
}

/// Overwrites 64-bit elements of a tensor of the input file, `(index, value)`.
fn broken_inputs(tensor: &str, elements: &[(usize, i64)], parts: &[&str]) {
    let copy = Copy::new(CASE);
    copy.edit_bytes("inputs.safetensors", |bytes| {
        let len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let header: Value = serde_json::from_slice(&bytes[8..8 + len]).unwrap();
        let start = 8 + len + header[tensor]["data_offsets"][0].as_u64().unwrap() as usize;
        for &(index, value) in elements {
            bytes[start + 8 * index..][..8].copy_from_slice(&value.to_le_bytes());
        }
    });
    copy.expect(false, parts);
}

#[test]
fn inputs_that_do_not_fit_name_tensor_and_place() {
    broken_inputs("input_ids", &[(1, 96)], &["row 0, position 1", "96", "tokenizer"]);
    broken_inputs("input_ids", &[(1, -1)], &["inputs.safetensors", "`input_ids`", "negative"]);
    broken_inputs("input_ids", &[(0, 92)], &["row 0", "image tokens", "92"]);
    broken_inputs("input_ids", &[(0, 93)], &["row 0", "video"]);
    broken_inputs("attention_mask", &[(0, 0), (2, 0)], &["`attention_mask`", "row 0", "gap"]);
    broken_inputs("image_grid_thw", &[(1, 5)], &["image 0", "[1, 5, 6]", "divisible by 2"]);
    broken_inputs("image_grid_thw", &[(1, 8)], &["row 0", "image tokens"]);
    broken_inputs("image_grid_thw", &[(0, -1)], &["`image_grid_thw`", "negative"]);
    broken_inputs("labels", &[(1, 96)], &["`labels`", "96"]);
    broken_inputs("pixel_values", &[(0, 0x7fc0_0000)], &["`pixel_values`", "NaN", "patch 0"]);
}

#[test]
fn inputs_that_lack_a_tensor_say_which() {
    for (tensor, parts) in [
        ("input_ids", ["`input_ids`", "missing"]),
        ("pixel_values", ["`pixel_values`", "image_grid_thw: 3"]),
        ("image_grid_thw", ["image tokens", "row 0"]),
    ] {
        let copy = Copy::new(CASE);
        copy.edit_header("inputs.safetensors", |h| {
            let value = h.as_object_mut().unwrap().remove(tensor).unwrap();
            h["renamed"] = value;
        });
        copy.expect(false, &parts);
    }
}
