//! Supervised fine-tuning against Transformers and PEFT, on the fixtures of `fixtures/make_alone.py`: chats
//! side by side have the losses and the gradients of every adapter matrix that each has by itself.

use std::{collections::BTreeMap, fs, ops::Range, path::Path};

use coxswain_models::{
    Shelves,
    families::{qwen2_5_vl::config::QwenConfig, qwen3_vl::config::Qwen3VlConfig},
    pretrained::prompts::Rows,
    two_towers::{
        inputs::ForwardInputs,
        rope::RopeIndex,
        sizes::{TowersConfig, TowersSizes},
    },
};
use coxswain_nn::{
    kernels::{Tape, flat::Flat, flat::FlatOn},
    params::{FlatGrads, Trainables},
};
use coxswain_proto::{ids::Step, run_spec::RunSpec};
use coxswain_task::{Assembly, StageClock, Task, TaskOn};
use coxswain_tasks::sft::{
    Sft,
    data::{ChatBatch, ChatSample},
};
use safetensors::SafeTensors;
use serde_json::{Value, json};

use crate::{fixture, relative_error, repository};

/// Cases with an adapter, on the head or not, and with embedding and head in full.
pub const CASES: [&str; 10] = [
    "flat-gqa-left",
    "nested-tied-right",
    "mqa-sharded-bf16",
    "rslora-patterns",
    "text-only-f16",
    "embeddings",
    "embeddings-tied",
    "qwen3-tied-left",
    "qwen3-untied-right",
    "qwen3-mqa-sharded-bf16",
];

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
        "model": {"path": dir.join("model"), "train": of("modules_to_save").as_array().cloned().unwrap_or_default()},
        "lora": lora,
        "data": {"path": repository().join("configs/assets/shapes/chats.jsonl")},
        "train": {"steps": 1, "global_batch": 1, "micro_batch": 1, "recompute": recompute},
    });
    // JSON is YAML.
    RunSpec::from_yaml(&run.to_string(), "golden", &[], coxswain_tasks::TASKS).unwrap()
}

fn sizes(dir: &Path) -> TowersSizes {
    let newer = |_| Qwen3VlConfig::from_dir(dir).map(|config| config.sizes());
    QwenConfig::from_dir(dir).map(|config| config.sizes()).or_else(newer).unwrap()
}

/// A case's rows without their padding: labels other than -100 are what is learned.
fn chats(case: &str) -> Vec<ChatSample> {
    let dir = fixture("golden").join(case);
    let sizes = sizes(&dir.join("model"));
    let inputs = ForwardInputs::read(&dir.join("inputs.safetensors"), sizes.patch_values).unwrap();
    let rows = Rows::Padded(&inputs.valid);
    let index = RopeIndex::new(&sizes, &inputs.input_ids, rows, &inputs.grids).unwrap();
    let labels = inputs.labels.unwrap();
    let (mut grids, mut pixels) = (&inputs.grids[..], &inputs.pixel_values[..]);
    let cells = rows.cells(labels.len()).into_iter().zip(index.images_per_row);
    let chat = |(number, (cells, images)): (usize, (Range<usize>, usize))| {
        let (image_shapes, other_grids) = grids.split_at(images);
        let patches: u32 = image_shapes.iter().map(|grid| grid.iter().product::<u32>()).sum();
        let (pixel_values, other_pixels) = pixels.split_at(patches as usize * sizes.patch_values);
        (grids, pixels) = (other_grids, other_pixels);
        ChatSample {
            index: number as u64,
            learned: labels[cells.clone()].iter().map(|&label| label != -100).collect(),
            input_ids: inputs.input_ids[cells].to_vec(),
            pixel_values: pixel_values.to_vec().into(),
            image_shapes: image_shapes.to_vec(),
            cut: 0,
        }
    };
    cells.enumerate().map(chat).collect()
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
    let samples = Sft::<B> { models: Shelves::default() }.open(&of_tiny).unwrap();
    let Assembly { objective, layout, initial } =
        TaskOn::<B>::build(&Sft { models: Shelves::<B>::default() }, &spec, &*samples, device).unwrap();
    let place = B::Flat::place(device);
    let mut grads = FlatGrads::<B::Flat>::at(&place, layout.len());
    let trainables = Trainables::new(layout.clone(), initial, device);
    let chats = chats(case);
    let batch = |chats: &[ChatSample]| ChatBatch::from_samples(Step(0), &chats.iter().collect::<Vec<_>>());
    let all = batch(&chats);
    let loss = objective.forward_backward(&trainables, &all, &mut grads, &mut StageClock::default()).unwrap();
    let again = objective.loss(&trainables, &all).unwrap();
    assert!((again.loss_sum - loss.loss_sum).abs() < 1e-5 * loss.loss_sum, "{again:?} is not {loss:?}");

    let bytes = fs::read(fixture("golden").join(case).join("alone.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let floats = |name: &str| -> Vec<f64> {
        let view = file.tensor(name).unwrap_or_else(|error| panic!("{name}: {error}"));
        view.data().chunks(4).map(|b| f64::from(f32::from_le_bytes(b.try_into().unwrap()))).collect()
    };
    let losses = floats("losses");
    let alone = chats.chunks(1).map(|chat| objective.loss(&trainables, &batch(chat)).unwrap().loss_sum);
    let off = relative_error(&alone.collect::<Vec<_>>(), &losses);
    assert!(off < 1e-4, "{case}: losses of chats alone are off by {off:e}");
    let off = relative_error(&[loss.loss_sum], &[losses.iter().sum()]);
    assert!(off < 1e-4, "{case}: the loss of chats side by side is off by {off:e}");
    let sums = grads.values_mut().read(0..layout.len());
    let mut worst = BTreeMap::new();
    for param in layout.params() {
        let ours: Vec<f64> = sums[param.range()].iter().map(|sum| f64::from(*sum)).collect();
        let off = relative_error(&ours, &floats(&format!("grad.{}", param.name)));
        if off >= 1e-3 || off.is_nan() {
            worst.insert(param.name.clone(), off);
        }
    }
    println!("{case}, recompute {recompute}: loss off by {off:.1e}");
    assert!(worst.is_empty(), "{case}, recompute {recompute}: gradients are off: {worst:?}");
}
