//! Memory that runs out on one rank of several, as a user sees it: nothing, but for a line in the log.

use std::{collections::BTreeMap, path::Path};

use serde_json::Value;

use crate::support::{
    CoxProcess, read_json,
    tiny::{HoldFile, results},
};

/// Bytes that a rank of these runs may hold, in MiB: several times what the small model takes by itself.
const CAPACITY_MIB: u64 = 600;

/// Trains four ranks on 16 samples a step; `fault` as `COX_FAULT_MEMORY` has it. Returns the exit code and
/// what was printed.
fn run(output: &Path, fault: &str, overrides: &[&str]) -> (Option<i32>, String) {
    let (status, printed) = start(output, &[("COX_FAULT_MEMORY", fault)], overrides).finish();
    (status.code(), printed)
}

fn start(output: &Path, environment: &[(&str, &str)], overrides: &[&str]) -> CoxProcess {
    let output_dir = format!("run.output_dir={}", output.display());
    let capacity = format!("memory.capacity={}", CAPACITY_MIB << 20);
    let mut arguments =
        vec!["run", "configs/quickstart.yaml", "--nproc-per-node", "4", &output_dir, &capacity];
    arguments.extend([
        "train.steps=6",
        "train.global_batch=16",
        "eval.samples=8",
        "optimizer.warmup_steps=2",
    ]);
    arguments.extend(overrides);
    CoxProcess::start_with(&arguments, environment)
}

fn timeline(output: &Path, rank: usize) -> Vec<Value> {
    let path = output.join(format!("memory/rank-{rank:04}.jsonl"));
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    text.lines().map(|line| serde_json::from_str(line).expect("one JSON object a line")).collect()
}

fn numbers(lines: &[Value], field: &str) -> Vec<u64> {
    lines.iter().map(|line| line[field].as_u64().expect("a number")).collect()
}

/// Norm of the difference of two runs' adapters over the norm of one.
fn adapter_difference(a: &Path, b: &Path) -> f64 {
    let read = |output: &Path| {
        let path = output.join("adapter/adapter_model.safetensors");
        let bytes = std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let tensors = safetensors::SafeTensors::deserialize(&bytes).expect("safetensors");
        let floats = |data: &[u8]| {
            let values = data.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
            values.map(f64::from).collect::<Vec<_>>()
        };
        tensors
            .iter()
            .map(|(name, tensor)| (name.to_owned(), floats(tensor.data())))
            .collect::<BTreeMap<String, Vec<f64>>>()
    };
    let (a, b) = (read(a), read(b));
    assert_eq!(a.keys().collect::<Vec<_>>(), b.keys().collect::<Vec<_>>());
    let (mut difference, mut norm) = (0.0, 0.0);
    for (x, y) in a.values().flatten().zip(b.values().flatten()) {
        difference += (x - y) * (x - y);
        norm += y * y;
    }
    (difference / norm).sqrt()
}

#[test]
fn an_overrun_on_one_of_four_ranks_costs_one_attempt_and_changes_nothing_that_is_learned() {
    let dir = tempfile::tempdir().unwrap();
    let small = dir.path().join("small");
    let (code, printed) = run(&small, "", &["train.micro_batch=2"]);
    assert_eq!(code, Some(0), "{printed}");
    for phase in ["forward", "backward"] {
        let output = dir.path().join(phase);
        // 4 samples want 800 MiB more, 2 want 400.
        let fault = format!("rank=2 step=3 phase={phase} mib=200");
        let (code, printed) = run(&output, &fault, &["train.micro_batch=4"]);
        assert_eq!(code, Some(0), "{printed}");
        for rank in 0..4 {
            let lines = timeline(&output, rank);
            assert_eq!(numbers(&lines, "step"), [0, 1, 2, 3, 4, 5], "{phase}, rank {rank}");
            assert_eq!(numbers(&lines, "attempts"), [1, 1, 1, 2, 1, 1], "{phase}, rank {rank}");
            assert_eq!(numbers(&lines, "micro_batch"), [4, 4, 4, 2, 2, 2], "{phase}, rank {rank}");
        }
        let message = format!("out of memory in {phase}: requested");
        assert!(printed.contains(&message) && printed.contains("held: "), "{printed}");
        assert!(
            printed.contains("rank 2: out of memory: all ranks go from a micro-batch of 4 to 2"),
            "{printed}"
        );
        let difference = adapter_difference(&output, &small);
        assert!(difference < 1e-4, "{phase}: {difference}");
        let summary = read_json(&output.join("summary.json"));
        let phases = &summary["peak_memory"][2]["phases"];
        assert!(phases[phase]["in_use"].as_u64() > Some(CAPACITY_MIB << 20), "{summary:#}");
    }
}

/// Rank 2 runs out of memory in step 3 while the others stand at the beginning of `phase` of that step, and
/// votes before they go on. Returns what was printed.
fn run_with_others_at(phase: &str, fault: &str, output: &Path) -> String {
    let holds = output.with_extension(format!("hold-{phase}"));
    let hold = |rank, phase| HoldFile::order(&holds, rank, phase, 3);
    let (out_of_memory, others) = (hold(2, "communication"), [0, 1, 3].map(|rank| hold(rank, phase)));
    let hold_dir = holds.display().to_string();
    let environment = [("COX_FAULT_MEMORY", fault), ("COX_TEST_HOLD", &hold_dir)];
    // Four micro-batches a rank: far more than a ballot takes from rank to rank.
    let mut running = start(output, &environment, &["train.micro_batch=4", "train.global_batch=64"]);
    out_of_memory.wait(&mut running);
    others.iter().for_each(|other| other.wait(&mut running));
    out_of_memory.release();
    others.into_iter().for_each(HoldFile::release);
    let (status, printed) = running.finish();
    assert!(status.success(), "{status}\n{printed}");
    printed
}

#[test]
fn the_others_give_their_attempts_up_and_learn_the_same_as_if_they_had_finished_them() {
    let dir = tempfile::tempdir().unwrap();
    for lost_in in ["forward", "backward"] {
        let fault = format!("rank=2 step=3 phase={lost_in} mib=200");
        let [early, late] = ["forward", "communication"].map(|others_in| {
            let output = dir.path().join(format!("{lost_in}-{others_in}"));
            (run_with_others_at(others_in, &fault, &output), results(&output))
        });
        let message = "rank 2: out of memory: all ranks go from a micro-batch of 4 to 2 from step 3 on, with the same samples in each step";
        // How many of them see it in time is the machine's to say.
        let gave_up = [
            "one other rank stopped its attempt",
            "2 other ranks stopped their attempts",
            "3 other ranks stopped their attempts",
        ];
        assert!(
            gave_up.iter().any(|who| early.0.contains(&format!("{message}; {who} early"))),
            "{}",
            early.0
        );
        // Ranks that wait in the vote have finished theirs.
        assert!(late.0.contains(message) && !late.0.contains(" early"), "{}", late.0);
        assert!(early.1 == late.1, "{lost_in}: giving up changes what is learned");
    }
}

#[test]
fn a_retry_with_kept_features_learns_what_one_without_learns() {
    let dir = tempfile::tempdir().unwrap();
    let learned = |cache: &str| {
        let output = dir.path().join(cache);
        let mode = format!("cache.mode={cache}");
        // Three at a time, then two: micro-batches of the retry straddle those that were ready.
        let overrides = ["train.global_batch=24", "train.micro_batch=3", "lora=null", &mode];
        let (code, printed) = run(&output, "rank=2 step=3 phase=forward mib=200", &overrides);
        assert_eq!(code, Some(0), "{printed}");
        assert!(printed.contains("all ranks go from a micro-batch of 3 to 2"), "{printed}");
        std::fs::read(output.join("expert.safetensors")).expect("it was trained")
    };
    assert!(learned("exact") == learned("off"), "another expert");
}

#[test]
fn what_does_not_fit_one_sample_at_a_time_ends_the_run_with_advice_and_its_own_exit_code() {
    let dir = tempfile::tempdir().unwrap();
    let (output, fault) = (dir.path().join("run"), "rank=1 step=2 phase=backward mib=900");
    let (code, printed) = run(&output, fault, &["train.micro_batch=4", "train.recompute=none"]);
    assert_eq!(code, Some(5), "{printed}");
    let from = "checkpoints/step-00000002";
    assert!(printed.contains(&format!("start again to resume from {from}")), "{printed}");
    assert!(output.join(from).join("manifest.json").is_file(), "{printed}");
    assert!(
        printed.contains("does not fit in memory even with one sample at a time: out of memory in backward"),
        "{printed}"
    );
    assert!(printed.contains("To make it fit, use train.recompute: full, or "), "{printed}");
}

#[test]
fn a_checkpoint_that_does_not_fit_is_given_up_and_training_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let output = dir.path().join("run");
    let fault = "rank=1 step=2 phase=checkpoint mib=900";
    let (code, printed) = run(&output, fault, &["train.micro_batch=4", "train.checkpoint_every=2"]);
    assert_eq!(code, Some(0), "{printed}");
    assert!(printed.contains("checkpoint of step 4 given up: out of memory in checkpoint"), "{printed}");
    let left = std::fs::read_dir(output.join("checkpoints")).expect("the first one fitted").flatten();
    let names: Vec<_> = left.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    assert_eq!(names, ["step-00000002"]);
    assert!(output.join("adapter/adapter_model.safetensors").exists());
}

#[test]
fn a_model_that_does_not_fit_is_refused_before_it_is_launched_and_while_it_loads() {
    let dir = tempfile::tempdir().unwrap();
    let (code, printed) = run(&dir.path().join("run"), "", &["memory.capacity=100000"]);
    assert_eq!(code, Some(5), "{printed}");
    assert!(printed.contains("not even one sample fits"), "{printed}");
    let output_dir = format!("run.output_dir={}", dir.path().join("alone").display());
    let alone = ["worker", "--config", "configs/quickstart.yaml", &output_dir, "memory.capacity=100000"];
    let out = super::support::cox(&alone).output().expect("cox was built");
    let printed = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(5), "{printed}");
    assert!(printed.contains("out of memory in loading"), "{printed}");
}
