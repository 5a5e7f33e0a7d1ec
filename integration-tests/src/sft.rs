//! Supervised fine-tuning against Transformers and PEFT, on the fixtures of `fixtures/make_fixtures.py`: the
//! mean loss of their labels, and the gradient of every adapter matrix.

use std::{collections::BTreeMap, fs};

use coxswain_models::qwen2_5_vl::{config::QwenConfig, inputs::ForwardInputs};
use coxswain_nn::{
    kernels::{Tape, flat::Flat, flat::FlatOn},
    params::{FlatGrads, Trainables},
};
use coxswain_proto::{ids::Step, run_spec::RunSpec};
use coxswain_task::{Built, StageClock, Task, TaskOn};
use coxswain_tasks::sft::{Sft, data::ChatBatch};
use safetensors::SafeTensors;
use serde_json::{Value, json};

use crate::{fixture, relative_error, repository};

/// Cases with an adapter that is not on the head.
pub const CASES: [&str; 5] =
    ["flat-gqa-left", "nested-tied-right", "mqa-sharded-bf16", "rslora-patterns", "text-only-f16"];

/// The run that goes on from a case's adapter.
fn spec(case: &str, recompute: &str) -> RunSpec {
    let dir = fixture("golden").join(case);
    let config = fs::read_to_string(dir.join("adapter/adapter_config.json")).unwrap();
    let config: Value = serde_json::from_str(&config).unwrap();
    let of = |key: &str| config[key].clone();
    let lora = json!({
        "rank": of("r"), "alpha": of("lora_alpha"), "rslora": of("use_rslora"), "targets": of("target_modules"),
        "rank_pattern": of("rank_pattern"), "alpha_pattern": of("alpha_pattern"),
        "init_from": dir.join("adapter"),
    });
    let run = json!({
        "run": {"name": "golden", "output_dir": "none"}, "task": {"type": "sft"},
        "model": {"path": dir.join("model")}, "lora": lora,
        "data": {"path": repository().join("configs/assets/shapes/chats.jsonl")},
        "train": {"steps": 1, "global_batch": 1, "micro_batch": 1, "recompute": recompute},
    });
    // JSON is YAML.
    RunSpec::from_yaml(&run.to_string(), "golden", &[], coxswain_tasks::TASKS).unwrap()
}

/// A case's inputs as a micro-batch: labels other than -100 are what is learned.
fn batch(case: &str) -> ChatBatch {
    let dir = fixture("golden").join(case);
    let config = QwenConfig::read(&dir.join("model")).unwrap();
    let inputs = ForwardInputs::read(&dir.join("inputs.safetensors"), config.vision.patch_values()).unwrap();
    let rows = inputs.valid.len();
    let labels = inputs.labels.unwrap();
    ChatBatch {
        step: Step(0),
        indices: (0..rows as u64).collect(),
        learned: labels.iter().map(|&label| label != -100).collect(),
        input_ids: inputs.input_ids,
        valid: inputs.valid,
        seq_len: inputs.seq,
        pixel_values: inputs.pixel_values,
        image_grids: inputs.grids,
        images_per_row: vec![0; rows],
    }
}

/// Compares one case under one recompute mode.
pub fn hold<B: Tape<Base = B>>(case: &str, recompute: &str, device: &B::Device) {
    let spec = spec(case, recompute);
    // What a batch is made of does not come from here; what builds is given it all the same.
    let mut of_tiny = spec.clone();
    let tiny = repository().join("configs/assets/tiny-vla").display().to_string();
    of_tiny.set_settings(&{
        let mut settings: coxswain_tasks::sft::config::SftSettings = spec.settings().unwrap();
        settings.model.path = tiny;
        settings
    });
    let samples = Sft.open(&of_tiny).unwrap();
    let Built { objective, layout, initial } = TaskOn::<B>::build(&Sft, &spec, &*samples, device).unwrap();
    let place = B::Flat::place(device);
    let mut grads = FlatGrads::<B::Flat>::at(&place, layout.len());
    let trainables = Trainables::new(layout.clone(), initial, device);
    let batch = batch(case);
    let loss =
        objective.forward_backward(&trainables, &batch, &mut grads, &mut StageClock::default()).unwrap();
    let again = objective.loss(&trainables, &batch).unwrap();
    assert!((again.loss_sum - loss.loss_sum).abs() < 1e-5 * loss.loss_sum, "{again:?} is not {loss:?}");

    let bytes = fs::read(fixture("golden").join(case).join("expected.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let floats = |name: &str| -> Vec<f64> {
        let view = file.tensor(name).unwrap_or_else(|error| panic!("{name}: {error}"));
        view.data().chunks(4).map(|b| f64::from(f32::from_le_bytes(b.try_into().unwrap()))).collect()
    };
    let mean = loss.loss_sum / loss.valid;
    let off = relative_error(&[mean], &floats("loss"));
    assert!(off < 1e-4, "{case}: the loss is off by {off:e}");
    let sums = grads.values_mut().read(0..layout.len());
    let mut worst = BTreeMap::new();
    for param in layout.params() {
        let ours: Vec<f64> = sums[param.range()].iter().map(|sum| f64::from(*sum) / loss.valid).collect();
        let off = relative_error(&ours, &floats(&format!("grad.{}", param.name)));
        if off >= 1e-3 || off.is_nan() {
            worst.insert(param.name.clone(), off);
        }
    }
    println!("{case}, recompute {recompute}: loss off by {off:.1e}");
    assert!(worst.is_empty(), "{case}, recompute {recompute}: gradients are off: {worst:?}");
}
