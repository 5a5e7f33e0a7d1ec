//! Sequence to sequence as a user runs it: `configs/seq2seq.yaml`, undisturbed and with workers killed.

use std::{path::Path, process::Command};

use crate::support::{CoxProcess, cox, killed, read_json, root};

const ADAPTER: &str = "adapter/adapter_model.safetensors";

fn command(output: &Path, overrides: &[&str]) -> Command {
    let output_dir = format!("run.output_dir={}", output.display());
    let mut arguments = vec!["run", "configs/seq2seq.yaml", &output_dir];
    arguments.extend(overrides);
    cox(&arguments)
}

#[test]
fn pairs_are_learned_the_held_out_loss_falls_and_rouge_rises() {
    let dir = tempfile::tempdir().expect("a directory");
    let output = dir.path().join("run");
    let (status, printed) = CoxProcess::of(command(&output, &["train.checkpoint_every=0"])).finish();
    assert!(status.success(), "{printed}");
    let summary = read_json(&output.join("summary.json"));
    let number = |pointer: &str| summary.pointer(pointer).and_then(|v| v.as_f64()).expect(pointer);
    let [before, after] = ["before", "after"].map(|when| number(&format!("/error_{when}/loss")));
    assert!(after < 0.1 * before, "held-out loss {before} -> {after}");
    let [before, after] = ["before", "after"].map(|when| number(&format!("/error_{when}/parts/rougeL")));
    assert!(before < 0.1 && after > 0.8, "ROUGE-L {before} -> {after}");
    assert!(printed.contains("held-out rougeL"), "{printed}");
    let manifest = read_json(&output.join("manifest.json"));
    let files = manifest["files"].as_array().expect("an array");
    assert!(files.iter().any(|file| file["path"] == ADAPTER), "{manifest:#}");
}

#[test]
fn workers_killed_three_times_leave_the_undisturbed_adapter_of_pairs() {
    killed::three_times(command, ADAPTER);
}

#[test]
fn predicted_memory_of_pairs_is_what_is_measured() {
    let dir = tempfile::tempdir().expect("a directory");
    let variants: [&[&str]; 5] = [
        &["train.recompute=full"],
        &["train.recompute=none"],
        &["train.recompute=selective", "train.micro_batch=4"],
        &["lora.targets=[q, v]", "train.micro_batch=16"],
        &["train.recompute=none", "model.train=['encoder\\.block\\.1']", "lora.targets=[EncDecAttention.q]"],
    ];
    for (number, variant) in variants.into_iter().enumerate() {
        let output = dir.path().join(number.to_string());
        let common =
            ["train.steps=4", "train.checkpoint_every=0", "eval.samples=0", "optimizer.warmup_steps=1"];
        let (status, printed) = CoxProcess::of(command(&output, &[&common[..], variant].concat())).finish();
        assert!(status.success(), "{printed}");
        let memory = &read_json(&output.join("summary.json"))["memory"];
        let [predicted, measured] =
            ["predicted", "measured"].map(|which| memory[which].as_f64().expect("a world of two has both"));
        println!("{variant:?}: {predicted} predicted, {measured} measured");
        let off = (predicted - measured).abs();
        assert!(off <= (0.03 * measured).max(8.0 * 1024.0 * 1024.0), "{variant:?}\n{memory:#}");
    }
}

#[test]
fn a_plan_tells_how_many_pairs_are_measured_and_answered_at_once() {
    let plan = |more: &[&str]| {
        let sizes = ["plan", "configs/seq2seq-sizes.yaml", "--section", "mt5-1.2b", "--json"];
        let out = cox(&[&sizes[..], more].concat()).output().expect("cox was built");
        let plan: serde_json::Value = serde_json::from_slice(&out.stdout).expect("one object");
        plan["memories"][0]["uses"].clone()
    };
    let most = |uses: &serde_json::Value, at: usize| uses[at]["fit"]["maximum"].as_u64().expect("it fits");
    let small = plan(&["--gpu", "V100-16"]);
    assert_eq!((&small[0]["use"], &small[1]["use"]), (&"evaluation".into(), &"answers".into()), "{small:#}");
    let large = plan(&["--gpu", "A100-40"]);
    let short = plan(&["--gpu", "V100-16", "data.max_source_tokens=256"]);
    for at in [0, 1] {
        assert!(
            most(&small, at) < most(&large, at) && most(&small, at) < most(&short, at),
            "{small:#}{large:#}"
        );
    }
    // What answers need no optimizer for, evaluation in a run has beside it.
    assert!(most(&small, 0) <= most(&small, 1), "{small:#}");
    let policy =
        cox(&["plan", "configs/quickstart.yaml", "--gpu", "A100-40"]).output().expect("cox was built");
    assert!(!String::from_utf8_lossy(&policy.stdout).contains("eval.batch"), "{policy:?}");
}

#[test]
fn a_pair_that_cannot_be_used_is_refused_before_the_first_step() {
    let dir = tempfile::tempdir().expect("a directory");
    let text = std::fs::read_to_string(root().join("configs/assets/deliveries/pairs.csv")).expect("it ships");
    let broken = dir.path().join("broken.csv");
    std::fs::write(&broken, text + "\"a\", \n").expect("a file");
    let output = dir.path().join("run");
    let data = format!("data.path={}", broken.display());
    let (status, printed) = CoxProcess::of(command(&output, &[&data])).finish();
    assert_eq!(status.code(), Some(3), "{printed}");
    assert!(printed.contains("broken.csv:362: has an empty `summary`"), "{printed}");
    assert!(!printed.contains("step      1/"), "{printed}");

    let output = dir.path().join("another");
    let (status, printed) = CoxProcess::of(command(&output, &["data.target=title"])).finish();
    assert_eq!(status.code(), Some(3), "{printed}");
    assert!(printed.contains("has no column `title`; name two of `text`, `summary`"), "{printed}");
}
