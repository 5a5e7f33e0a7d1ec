//! Memory of streaming training, of separation and of a policy of LeRobot's, from the timelines of whole
//! runs: what was predicted, and flat in the number of batches.
//!
//! The counting allocator counts for the whole process, so these tests take turns.

use std::{
    alloc::System,
    path::Path,
    sync::{Mutex, MutexGuard, PoisonError},
};

use burn_flex::Flex;
use coxswain_integration_tests::{at_rest, repository};
use coxswain_models::families::shelf;
use coxswain_nn::kernels::sizes::Sizes;
use coxswain_policies::{directory::PolicyDirectory, smolvla::SmolVlaConfig};
use coxswain_proto::run_spec::RunSpec;
use coxswain_task::{TaskOn, memory::PROCESS};
use coxswain_tasks::{separation::Separation, trajectory::Trajectory, vla_flow::VlaFlow};
use coxswain_worker::{
    memory::CountingAllocator,
    train::{Summary, TaskTrainer, TrainerOptions},
};
use safetensors::{Dtype, tensor::TensorView};
use serde_json::Value;

#[global_allocator]
static ALLOCATOR: CountingAllocator<System> = CountingAllocator(System);

static EXCLUSIVE: Mutex<()> = Mutex::new(());

#[expect(clippy::disallowed_methods, reason = "no video is decoded here")]
fn exclusive() -> MutexGuard<'static, ()> {
    // The symbol tables of a failed test's backtrace would stay in memory and count in the tests after it.
    std::panic::set_hook(Box::new(|failure| eprintln!("{failure}")));
    EXCLUSIVE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Trains a world of one; its summary and the lines of its timeline.
fn train(task: &'static dyn TaskOn<Flex>, output: &Path, changes: &[&str]) -> (Summary, Vec<Value>) {
    let assets = repository().join("configs/assets");
    let at = |key: &str, name: &str| format!("{key}={}", assets.join(name).display());
    let mut overrides = match task.name() {
        "vla_flow" => vec![at("data.path", "metaworld-mini")],
        "trajectory" => vec![at("extractor.path", "tiny-vla"), at("data.path", "pictures")],
        _ => vec![at("data.path", "plucks")],
    };
    overrides.push(format!("run.output_dir={}", output.display()));
    overrides.extend(["eval.samples=0", "train.checkpoint_every=0"].map(str::to_owned));
    overrides.extend(changes.iter().map(ToString::to_string));
    let name = if task.name() == "vla_flow" { "smolvla" } else { task.name() };
    let file = repository().join(format!("configs/{name}.yaml"));
    let spec = RunSpec::load(&file, &overrides, coxswain_tasks::TASKS).expect("it is in the repository");
    let options = TrainerOptions { device: Default::default(), listener: None };
    let summary = at_rest::train(&mut TaskTrainer::<Flex>::new(task, options), &spec, 0);
    let lines = std::fs::read_to_string(output.join("memory/rank-0000.jsonl")).expect("written");
    let lines = lines.lines().map(|line| serde_json::from_str(line).expect("one JSON object a line"));
    (summary, lines.collect())
}

/// Largest bytes in use in a step.
fn peak(line: &Value) -> u64 {
    let phases = line["phases"].as_object().expect("phases by name");
    phases.values().filter_map(|phase| phase["in_use"].as_u64()).max().expect("a step has phases")
}

#[test]
fn memory_is_flat_in_the_number_of_batches() {
    let _exclusive = exclusive();
    const STEPS: usize = 1000;
    let few = ["train.steps=1000", "train.global_batch=1", "train.micro_batch=1"];
    let one = ["data.threads=1", "data.prefetch=1", "extractor.layers=[0]", "optimizer.warmup_steps=0"];
    let dir = tempfile::tempdir().expect("a directory");
    let (_, lines) = train(
        coxswain_tasks::leaked(Trajectory::<Flex>::default()),
        &dir.path().join("run"),
        &[&few[..], &one].concat(),
    );
    assert_eq!(lines.len(), STEPS);
    // What grows lifts every later step; a sample that is decoded at the moment of a peak lifts that one.
    let median = |lines: &[Value], of: fn(&Value) -> u64| {
        let mut bytes: Vec<u64> = lines.iter().map(of).collect();
        bytes.sort_unstable();
        bytes[bytes.len() / 2] as f64
    };
    let at_rest = |line: &Value| line["in_use"].as_u64().expect("bytes");
    // What a step's trajectories take: held until the end, the later half would have 475 times that more.
    let batch = f64::from(49 * 96 * 4);
    for (what, of) in [("peak", peak as fn(&Value) -> u64), ("memory between steps", at_rest)] {
        let (early, late) = (median(&lines[50..525], of), median(&lines[525..], of));
        assert!(late <= early + batch / 2.0, "the {what} grew from {early} to {late} bytes");
    }
}

/// Trains for a few steps under each of these changes, and lays what was predicted beside the peak.
fn compare(task: &'static dyn TaskOn<Flex>, common: &[&str], cases: &[&[&str]]) {
    const NEAR: f64 = 0.03;
    const BYTES: f64 = 8.0 * 1024.0 * 1024.0;
    for (number, changes) in cases.iter().enumerate() {
        let dir = tempfile::tempdir().expect("a directory");
        let (summary, _) = train(task, &dir.path().join("run"), &[*changes, common].concat());
        let outcome = summary.memory.expect("a run of its own micro-batch is compared");
        // From sizes alone: what earlier runs on this machine teach is not what is tested. Of a worker's
        // process nothing is here.
        let predicted = outcome.categories.iter().map(|row| row.predicted).sum::<u64>() - PROCESS;
        let (predicted, measured) = (predicted as f64, outcome.measured as f64);
        println!(
            "{number}: {:.1} MiB predicted, {:.1} measured",
            predicted / 1048576.0,
            measured / 1048576.0
        );
        let off = (predicted - measured).abs();
        assert!(off <= BYTES.max(NEAR * measured), "{changes:?}: {predicted} for {outcome}");
        // Beyond what such small runs hold anyway, too, or 8 MiB would forgive everything.
        assert!(off <= 0.15 * measured, "{changes:?}: {predicted} for {outcome}");
    }
}

#[test]
fn predicted_peaks_are_the_measured_ones() {
    let _exclusive = exclusive();
    // Without held-out images there are three times sixteen, and no batch is smaller.
    let common =
        ["train.steps=6", "train.global_batch=16", "optimizer.warmup_steps=0", "data.holdout_every=0"];
    let cases: [&[&str]; 6] = [
        &["train.micro_batch=4"],
        &["network.type=vae", "train.micro_batch=16", "data.image_size=224"],
        &["network.type=transformer", "train.micro_batch=8"],
        &["network.type=transformer", "train.micro_batch=16", "train.recompute=full"],
        &["network.hidden_dim=1024", "network.num_layers=4", "train.micro_batch=16", "train.recompute=full"],
        &["network.hidden_dim=512", "train.micro_batch=16", "cache.mode=exact"],
    ];
    compare(coxswain_tasks::leaked(Trajectory::<Flex>::default()), &common, &cases);
}

#[test]
fn predicted_peaks_of_a_separator_are_the_measured_ones() {
    let _exclusive = exclusive();
    let common = ["train.steps=3", "train.global_batch=4", "optimizer.warmup_steps=0"];
    let rounded = "network.activations_dtype=bfloat16";
    let cases: [&[&str]; 5] = [
        &["train.micro_batch=4"],
        &["train.micro_batch=2", "train.recompute=none"],
        &["train.micro_batch=4", "network.hidden_dim=64", rounded],
        &["train.micro_batch=4", "network.bands=30", "network.layers=3", "train.recompute={every: 2}"],
        &["train.micro_batch=4", "data.segment_seconds=2", "train.recompute=selective"],
    ];
    compare(&Separation, &common, &cases);
}

#[test]
fn predicted_peaks_of_a_policy_are_the_measured_ones() {
    let _exclusive = exclusive();
    let dir = tempfile::tempdir().expect("a directory");
    write_policy(dir.path());
    let at = |key: &str, name: &str| format!("{key}={}", dir.path().join(name).display());
    let [policy, backbone] = [at("model.path", "policy"), at("model.backbone", "vlm")];
    let common = [
        &policy,
        &backbone,
        "train.steps=4",
        "train.global_batch=16",
        "data.holdout_episodes=[]",
        "optimizer.warmup_steps=0",
    ];
    let vlm = r"model.train=['text_model\.layers', connector, embed_tokens]";
    let both = "lora.targets='.*(text_model|lm_expert).*_proj'";
    let cases: [&[&str]; 8] = [
        &["train.micro_batch=8", "train.recompute=none"],
        &["train.micro_batch=8", "train.recompute=full"],
        &["train.micro_batch=8", "train.recompute=none", both],
        &["train.micro_batch=8", "train.recompute=full", both, "lora.rank=8"],
        &["train.micro_batch=8", "train.recompute=none", vlm],
        &["train.micro_batch=4", "train.recompute=full", vlm],
        &["train.micro_batch=8", "train.recompute=none", "cache.mode=exact"],
        &["train.micro_batch=8", "train.recompute=full", both, "cache.mode=exact"],
    ];
    compare(coxswain_tasks::leaked(VlaFlow::<Flex>::default()), &common, &cases);
}

/// The golden policy's directories with a model between tiny and published, of random weights.
fn write_policy(dir: &Path) {
    let golden = repository().join("integration-tests/fixtures/golden/smolvla");
    for part in ["policy", "vlm"] {
        std::fs::create_dir(dir.join(part)).expect("a temporary directory");
        for file in std::fs::read_dir(golden.join(part)).expect("part of the repository") {
            let file = file.expect("part of the repository").path();
            std::fs::copy(&file, dir.join(part).join(file.file_name().expect("a file"))).expect("copied");
        }
    }
    let change = |path: &str, changes: &[(&str, &str, Value)]| {
        let path = dir.join(path);
        let mut json: Value = serde_json::from_slice(&std::fs::read(&path).expect("copied")).expect("JSON");
        for (section, key, value) in changes {
            let at = if section.is_empty() { &mut json } else { &mut json[*section] };
            at[*key] = value.clone();
        }
        std::fs::write(path, json.to_string()).expect("a temporary directory");
    };
    let [text, vision] = ["text_config", "vision_config"];
    let number = |value: u32| Value::from(value);
    change(
        "vlm/config.json",
        &[
            (text, "hidden_size", number(192)),
            (text, "num_hidden_layers", number(6)),
            (text, "num_attention_heads", number(6)),
            (text, "num_key_value_heads", number(2)),
            (text, "head_dim", number(32)),
            (text, "intermediate_size", number(512)),
            (vision, "hidden_size", number(192)),
            (vision, "num_hidden_layers", number(4)),
            (vision, "num_attention_heads", number(6)),
            (vision, "intermediate_size", number(768)),
            (vision, "image_size", number(128)),
            (vision, "patch_size", number(16)),
        ],
    );
    let side = Value::from(vec![128, 128]);
    change(
        "policy/config.json",
        &[("", "num_vlm_layers", number(6)), ("", "resize_imgs_with_padding", side)],
    );
    std::fs::remove_file(dir.join("policy/model.safetensors")).expect("copied");
    let directory = PolicyDirectory::from_dir(&dir.join("policy")).expect("it is read");
    let config = SmolVlaConfig::from_directory(&directory).expect("it is read");
    let vlm = dir.join("vlm");
    let family = shelf::<Sizes>().joint.of(&vlm).expect("its own is read");
    let outline = family.outline(&vlm, config.within()).expect("a legal configuration");
    let tensors = outline.tensors.iter().cloned().chain(config.own_tensors(&outline, None));
    let tensors: Vec<(String, Vec<usize>, Vec<u8>)> = tensors
        .map(|(name, shape)| {
            let count = shape.iter().product::<usize>();
            let scale = (shape.iter().skip(1).product::<usize>() as f32).powf(-0.5);
            let value = |at: usize| match shape.len() {
                1 => 1.0,
                _ => scale * (((at * 7919 + name.len() * 104_729) % 1009) as f32 / 504.5 - 1.0),
            };
            let bytes = (0..count).flat_map(|at| half::bf16::from_f32(value(at)).to_le_bytes()).collect();
            (name, shape, bytes)
        })
        .collect();
    let views = tensors.iter().map(|(name, shape, bytes)| {
        (name, TensorView::new(Dtype::BF16, shape.clone(), bytes).expect("shapes and bytes agree"))
    });
    safetensors::serialize_to_file(views, None, &dir.join("policy/model.safetensors"))
        .expect("a temporary directory");
}
