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
