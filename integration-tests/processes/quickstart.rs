//! The quickstart as a user runs it: a coordinator and two workers, real model, real data, an adapter at the
//! end.

mod anew;
mod buckets;
mod cache;
mod chaos;
mod chats;
mod deploy;
mod documents;
mod elastic;
mod exhausted;
mod faults;
mod first;
mod frozen;
mod identity;
mod impaired;
mod kept;
mod launch;
mod lerobot;
mod limits;
mod memory;
mod mixture;
mod network;
mod nodes;
mod one_stream;
mod optimizers;
mod pairs;
mod prediction;
mod profile;
mod readers;
mod recipes;
mod relaunch;
mod samples;
mod seams;
mod separation;
mod serve;
mod sharded;
mod signals;
mod stages;
mod standby;
mod standstill;
mod support;
mod traces;
mod trainjob;
mod trajectories;

use nix::sys::signal::Signal;
use support::{
    CoxProcess, cox, losses,
    processes::{signal, worker_of},
    read_json, root,
    tiny::Tiny,
    train,
};

#[test]
fn the_quickstart_learns_and_leaves_everything_a_user_needs() {
    let dir = tempfile::tempdir().unwrap();
    let output = dir.path().join("run");
    let summary = train(&output, &[]);
    let number = |pointer: &str| summary.pointer(pointer).and_then(|v| v.as_f64()).expect(pointer);
    assert!(number("/loss_last") < 0.7 * number("/loss_first"), "{summary:#}");
    let (before, after) = (number("/error_before/mse_normalized"), number("/error_after/mse_normalized"));
    assert!(after < 0.8 * before, "held-out error {before} -> {after}");
    assert_eq!(summary["peak_memory"].as_array().map(Vec::len), Some(2));
    assert!(summary["peak_memory"][1]["driver"].as_u64() > Some(1 << 20), "{summary:#}");

    let manifest = read_json(&output.join("manifest.json"));
    let files = manifest["files"].as_array().expect("an array");
    assert!(files.iter().any(|file| file["path"] == "adapter/adapter_model.safetensors"), "{manifest:#}");
    for file in files {
        let path = output.join(file["path"].as_str().expect("a path"));
        let length = std::fs::metadata(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display())).len();
        assert_eq!(Some(length), file["bytes"].as_u64(), "{}", path.display());
    }
    let log = std::fs::read_to_string(output.join("logs/coordinator.log")).expect("the coordinator's log");
    assert!(log.contains("150/150"), "one line a step:\n{log}");
    let page = std::fs::read_to_string(output.join("report.html")).expect("the run's report");
    for part in
        ["Training loss", "held-out mse normalized", "Time of a step", "Held-out samples", "0 missing"]
    {
        assert!(page.contains(part), "{part} in the report");
    }
    assert!(page.matches("data:image/png;base64,").count() >= 4, "a picture of each sample");
    assert!(!page.contains("<script") && page.len() < 3 << 20, "{} bytes", page.len());
}

#[test]
fn at_debug_a_ranks_log_says_in_which_generation_step_and_phase_a_line_was_written() {
    let tiny = Tiny::new(3, 0);
    let (status, printed) = tiny.start(&["--log", "debug"]).finish();
    assert!(status.success(), "{printed}");
    let log = std::fs::read_to_string(tiny.output().join("logs/rank0001/stderr.log")).expect("rank 1's log");
    let place = "generation=1 rank=1  step=2  phase=backward";
    let told = |line: &str| line.contains("backward took") && line.ends_with(place);
    assert!(log.lines().any(told), "{log}");
}

#[test]
fn a_run_stopped_half_way_resumes_with_the_same_losses_and_leaves_the_same_adapter() {
    let dir = tempfile::tempdir().unwrap();
    let short = ["train.steps=8", "train.checkpoint_every=4", "eval.samples=0", "optimizer.warmup_steps=2"];
    let whole = train(&dir.path().join("whole"), &short);
    let output = dir.path().join("halves");
    let output_dir = format!("run.output_dir={}", output.display());
    let mut arguments = vec!["run", "configs/quickstart.yaml", &output_dir];
    arguments.extend(short);
    let mut running = CoxProcess::start(&arguments);
    // Killed outright, at any point after the first checkpoint: nothing is drained.
    running.wait_for("5/8");
    drop(running);
    let resumed = train(&output, &short);
    let first = resumed["first_step"].as_u64().expect("a number") as usize;
    assert!((4..8).contains(&first), "resumed at {first}");
    assert_eq!(losses(&whole)[first..], losses(&resumed));
    let adapter =
        |run: &str| std::fs::read(dir.path().join(run).join("adapter/adapter_model.safetensors")).unwrap();
    assert!(adapter("whole") == adapter("halves"), "the resumed run leaves another adapter");
    let told = |arguments: &[&str]| {
        let out = cox(arguments).output().expect("cox was built");
        assert!(out.status.success(), "{out:?}");
        String::from_utf8(out.stdout).expect("text")
    };
    let [below, one, other] = ["", "whole", "halves"].map(|run| dir.path().join(run).display().to_string());
    // A longer run of the same says what becomes of its rates.
    let mut longer = vec!["run", "configs/quickstart.yaml", &output_dir];
    longer.extend([
        "train.steps=10",
        "train.checkpoint_every=4",
        "eval.samples=0",
        "optimizer.warmup_steps=2",
    ]);
    let (status, printed) = CoxProcess::start(&longer).finish();
    assert!(status.success(), "{printed}");
    let line = printed.lines().find(|line| line.contains("the run's length changed from 8 to 10 steps; "));
    let follows = line.is_some_and(|line| line.contains("rates continue at") && line.contains("instead of"));
    assert!(follows, "{printed}");
    let listed = told(&["runs", &below]);
    assert_eq!(listed.lines().filter(|line| line.contains("finished")).count(), 2, "{listed}");
    assert!(listed.contains("8 of 8") && listed.contains("10 of 10"), "{listed}");
    let differing = told(&["diff", &one, &other]);
    assert!(differing.contains("run.output_dir") && !differing.contains("lora."), "{differing}");
}

#[test]
fn world_size_does_not_change_what_is_learned() {
    let dir = tempfile::tempdir().unwrap();
    let short = ["train.steps=4", "eval.samples=0", "optimizer.warmup_steps=2"];
    let run = |name: &str, world: &str| {
        let mut overrides = vec!["--nproc-per-node", world];
        overrides.extend(short);
        losses(&train(&dir.path().join(name), &overrides))
    };
    let (one, two, three) = (run("one", "1"), run("two", "2"), run("three", "3"));
    for (world, other) in [(2, &two), (3, &three)] {
        for (a, b) in one.iter().zip(other) {
            let (a, b) = (f64::from_bits(*a), f64::from_bits(*b));
            assert!((a - b).abs() <= 1e-5 * a.abs(), "world {world}: {a} and {b}");
        }
    }
    assert_eq!(two, run("again", "2"), "the same world gives the same bits");
}

#[test]
fn without_restarts_a_killed_worker_ends_the_run_with_its_name_and_its_own_exit_code() {
    let dir = tempfile::tempdir().unwrap();
    let output = dir.path().join("run");
    let output_dir = format!("run.output_dir={}", output.display());
    let arguments = ["run", "configs/quickstart.yaml", &output_dir, "eval.samples=0", "--max-restarts=0"];
    let mut running = CoxProcess::start(&arguments);
    running.wait_for("3/150");
    signal(worker_of(running.pid(), 1).expect("it lives"), Signal::SIGKILL);
    let (status, printed) = running.finish();
    assert_eq!(status.code(), Some(4), "{printed}");
    assert!(printed.contains("rank 1"), "the first cause names its rank:\n{printed}");
    let failure = read_json(&output.join("failure.json"));
    assert_eq!(failure["exit_code"], 4, "{failure:#}");
    assert_eq!(failure["first_cause"]["rank"], 1, "{failure:#}");
}

#[test]
fn a_config_with_a_typing_error_is_refused_before_anything_starts() {
    let dir = tempfile::tempdir().unwrap();
    let text = std::fs::read_to_string(root().join("configs/quickstart.yaml")).unwrap();
    let config = dir.path().join("typo.yaml");
    std::fs::write(&config, text.replace("micro_batch", "mico_batch")).unwrap();
    let output_dir = format!("run.output_dir={}", dir.path().join("run").display());
    let (status, printed) = CoxProcess::start(&["run", config.to_str().unwrap(), &output_dir]).finish();
    assert_eq!(status.code(), Some(2), "{printed}");
    assert!(printed.contains("mico_batch") && printed.contains("micro_batch"), "{printed}");
    assert!(!dir.path().join("run").exists(), "nothing is half-written");
}
