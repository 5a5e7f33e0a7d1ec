//! Adapters that nothing here has written: refused by file, or read.

use std::fs;

use coxswain_fuzz::Target;
use safetensors::{Dtype, tensor::TensorView};

use super::*;

const CONFIG: &str = r#"{"peft_type": "LORA", "base_model_name_or_path": "m", "r": 4, "lora_alpha": 8, "bias": "none",
 "target_modules": ["q_proj", "v_proj"], "rank_pattern": {"^model.layers.0.q_proj": 2}, "alpha_pattern": {"v_proj": 3.5},
 "modules_to_save": null, "use_dora": false, "use_rslora": true, "lora_dropout": 0.1, "fan_in_fan_out": false,
 "layers_to_transform": [0, 1], "layers_pattern": "layers", "exclude_modules": "lm_head", "task_type": null}"#;

fn modules() -> Vec<Module> {
    let linear = |name: &str| Module {
        name: format!("model.{name}"),
        old_name: name.to_owned(),
        kind: ModuleKind::Linear { inputs: 6, outputs: 4, bias: false, head: name == "lm_head" },
    };
    let names = ["layers.0.q_proj", "layers.0.v_proj", "layers.1.q_proj", "layers.1.v_proj", "lm_head"];
    names.map(linear).to_vec()
}

fn tensors() -> Vec<u8> {
    let bytes = [0; 4 * 4 * 6];
    let of = |name: &str, rank: usize| {
        let key = |side| format!("base_model.model.model.{name}.lora_{side}.weight");
        let view = |shape: [usize; 2]| {
            TensorView::new(Dtype::F32, shape.to_vec(), &bytes[..4 * shape[0] * shape[1]])
                .expect("so many bytes")
        };
        [(key("A"), view([rank, 6])), (key("B"), view([4, rank]))]
    };
    let all =
        [("layers.0.q_proj", 2), ("layers.0.v_proj", 4), ("layers.1.q_proj", 4), ("layers.1.v_proj", 4)];
    safetensors::serialize(all.into_iter().flat_map(|(name, rank)| of(name, rank)), None)
        .expect("small tensors")
}

/// What reading an adapter of these tensors is refused for: names and shapes, with holes of a file for data.
fn refused(config: &str, tensors: &[(&str, &[u64])]) -> String {
    let dir = tempfile::tempdir().expect("a directory");
    fs::write(dir.path().join("adapter_config.json"), config).expect("a file");
    let mut end = 0;
    let entries = tensors.iter().map(|(name, shape)| {
        let begin = end;
        end += 4 * shape.iter().product::<u64>();
        let info = serde_json::json!({"dtype": "F32", "shape": shape, "data_offsets": [begin, end]});
        ((*name).to_owned(), info)
    });
    let header = serde_json::Value::Object(entries.collect()).to_string();
    let path = dir.path().join("adapter_model.safetensors");
    let length = header.len() as u64;
    fs::write(&path, [&length.to_le_bytes()[..], header.as_bytes()].concat()).expect("a file");
    let file = fs::OpenOptions::new().write(true).open(&path).expect("a file");
    file.set_len(8 + length + end).expect("holes take no room");
    PeftAdapter::read(dir.path(), &modules()).expect_err("it is no adapter of this model").to_string()
}

/// More than any machine has memory for: what reads it before it refuses it does not get to the end.
const ELEMENTS: u64 = 1 << 38;

#[test]
fn what_is_larger_than_the_model_is_not_read() {
    let a = "base_model.model.model.layers.0.q_proj.lora_A.weight";
    let told = refused(CONFIG, &[(a, &[ELEMENTS, 6])]);
    assert!(told.contains("shape [274877906944, 6]"), "{told}");
    let saved =
        r#"{"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}"#;
    let whole = "base_model.model.lm_head.weight";
    let adapters: Vec<_> = ["layers.0.q_proj", "layers.1.q_proj"]
        .into_iter()
        .flat_map(|name| ["A", "B"].map(|side| format!("base_model.model.model.{name}.lora_{side}.weight")))
        .collect();
    let shapes: [&[u64]; 2] = [&[4, 6], &[4, 4]];
    let adapters = adapters.iter().map(String::as_str).zip(shapes.into_iter().cycle());
    let all: Vec<_> = adapters.chain([(whole, &[ELEMENTS, 6][..])]).collect();
    let told = refused(saved, &all);
    assert!(told.contains("larger than the model's tensor"), "{told}");
    let told = refused(saved, &[("of nobody", &[ELEMENTS])]);
    assert!(told.contains("tensor `of nobody`"), "{told}");
}

#[test]
fn a_list_of_more_than_a_model_has_is_refused_by_its_field() {
    for field in ["target_modules", "exclude_modules", "modules_to_save", "layers_to_transform"] {
        let mut config: serde_json::Value = serde_json::from_str(CONFIG).expect("JSON");
        config[field] = (0..100_000).map(|entry| format!("nobody{entry}")).collect();
        let told = refused(&config.to_string(), &[]);
        assert!(told.contains(&format!("`{field}`: more than 4096 entries")), "{told}");
    }
    let mut config: serde_json::Value = serde_json::from_str(CONFIG).expect("JSON");
    let ranks = (0..100_000).map(|entry| (format!("nobody{entry}"), 2.into()));
    config["rank_pattern"] = serde_json::Value::Object(ranks.collect());
    let told = refused(&config.to_string(), &[]);
    assert!(told.contains("`rank_pattern`: more than 4096 entries"), "{told}");
}

#[test]
fn hostile_adapters_are_refused_or_read() {
    let dir = tempfile::tempdir().expect("a directory");
    let [config, weights] =
        ["adapter_config.json", "adapter_model.safetensors"].map(|name| dir.path().join(name));
    let read = || PeftAdapter::read(dir.path(), &modules());
    fs::write(&config, CONFIG).expect("a file");
    fs::write(&weights, tensors()).expect("a file");
    read().expect("nothing is wrong with it");
    // Patterns are expressions, of which each is compiled within a bound of its own.
    Target::new("adapter_config.json", [CONFIG.into()]).tries(1_000).holds(64 << 20, 4096).check(|bytes| {
        fs::write(&config, bytes).expect("a file");
        drop(read());
    });
    fs::write(&config, CONFIG).expect("a file");
    Target::new("adapter_model.safetensors", [tensors()]).tries(1_000).holds(8 << 20, 64).check(|bytes| {
        fs::write(&weights, bytes).expect("a file");
        drop(read());
    });
}
