//! What a GPU held within passes, beside what `cox plan` says that it will.

use std::{fs, path::Path};

use coxswain_integration_tests::solo::{quickstart, train};
use coxswain_proto::{memory::Category, run_spec::DeviceChoice};
use coxswain_task::memory::{Ask, Place};
use coxswain_tasks::vla_flow::memory::Subject;
use coxswain_worker::device::ChosenTrainer;
use serde_json::Value;

use crate::{gpus, tasks};

/// The most in use within passes: measured, and predicted but for what a context takes.
fn peaks(settings: &[&str]) -> [u64; 2] {
    let dir = tempfile::tempdir().expect("a directory for temporary files");
    let more = ["train.steps=2", "train.global_batch=4", "train.micro_batch=4", "eval.samples=0"];
    let spec = quickstart(dir.path(), &[&more, settings].concat());
    train(&mut ChosenTrainer::new(tasks(), Some(DeviceChoice::Cuda), 0, None), &spec, 0);
    let lines = fs::read_to_string(Path::new(&spec.run.output_dir).join("memory/rank-0000.jsonl"));
    let last: Value = serde_json::from_str(lines.expect("written").lines().last().expect("two steps"))
        .expect("one JSON object a line");
    let of = |phase: &str| last["phases"][phase]["in_use"].as_u64().expect("it has run");
    let ask = Ask { micro_batch: 4, world: 1, rank: 0, place: Place::Gpu };
    let predicted = Subject::from_spec(&spec, coxswain_models::families::shelf())
        .expect("its files are in the repository")
        .predict(ask);
    [of("forward").max(of("backward")), predicted.peak() - predicted.of(Category::Framework)]
}

#[test]
fn a_gpu_holds_what_was_planned() {
    if gpus("memory beside its prediction").is_none() {
        return;
    }
    for settings in [
        &["train.recompute=none", "model.weights_dtype=float32"][..],
        &["train.recompute=full", "model.weights_dtype=float32"],
        &["train.recompute=none", "model.weights_dtype=bfloat16"],
        &["train.recompute=selective", "model.weights_dtype=bfloat16"],
        &["train.recompute=none", "model.weights_dtype=bfloat16", "lora.dropout=0.1"],
        &["train.recompute=full", "model.weights_dtype=float32", "lora.dropout=0.1"],
    ] {
        let [measured, predicted] = peaks(settings);
        let off = predicted as f64 / measured as f64 - 1.0;
        println!("{settings:?}: {measured} bytes at most, {predicted} predicted, {:+.1} %", 100.0 * off);
        assert!(off.abs() < 0.002, "{settings:?}: {measured} bytes, {predicted} predicted");
    }
}

/// Codes and the widened copy: what a plan leaves out of weights in bfloat16, it leaves out here, to 1 %.
#[test]
fn a_gpu_holds_few_bits_as_planned() {
    if gpus("memory of 4 and 8 bits beside its prediction").is_none() {
        return;
    }
    for recompute in ["train.recompute=full", "train.recompute=none"] {
        let [half, nf4, int8] = ["bfloat16", "nf4", "int8"].map(|dtype| {
            let settings = [recompute, &format!("model.weights_dtype={dtype}")];
            let [measured, predicted] = peaks(&settings);
            println!("{settings:?}: {measured} bytes at most, {predicted} predicted");
            [measured as f64, predicted as f64]
        });
        for [measured, predicted] in [nf4, int8] {
            let off = ((measured - predicted) - (half[0] - half[1])) / measured;
            assert!(off.abs() < 0.01, "{recompute}: {measured} bytes, {predicted} predicted, {half:?}");
            assert!(measured < half[0] && predicted < half[1], "{recompute}: more than bfloat16 takes");
        }
    }
}
