//! A task and families of models that no crate of the repository knows have all that the engine gives: every
//! test runs `cox-toy` as real processes.

mod diverged;
mod families;
mod links;
mod numbers;
#[path = "../../../processes/support/processes.rs"]
#[allow(dead_code)]
mod processes;
mod reading;
mod refusals;
mod sick;
mod support;
mod validation;
mod witness;

use nix::sys::signal::Signal;
use serde_json::Value;

use processes::{signal, worker_of};
use support::{Toy, free_endpoint, get, losses, read_json};

const SHORT: [&str; 3] = ["train.steps=8", "train.checkpoint_every=2", "optimizer.warmup_steps=2"];

#[test]
fn two_ranks_learn_the_table_and_leave_the_tasks_own_artifact() {
    let toy = Toy::new(500);
    let (summary, printed) = toy.train("run", &[]);
    let number = |pointer: &str| summary.pointer(pointer).and_then(Value::as_f64).expect(pointer);
    assert!(number("/loss_last") < 0.5 * number("/loss_first"), "{summary:#}\n{printed}");
    assert!(number("/error_after/mse") < 0.5 * number("/error_before/mse"), "{summary:#}");
    assert!(number("/error_after/mae") > 0.0, "{summary:#}");
    toy.assert_audited("run", 40);

    let manifest = read_json(&toy.path("run/manifest.json"));
    let files = manifest["files"].as_array().expect("an array");
    let listed = files.iter().find(|file| file["path"] == "network.safetensors").expect("it is listed");
    let network = toy.network("run");
    assert_eq!(listed["bytes"].as_u64(), Some(network.len() as u64));
    let tensors = safetensors::SafeTensors::deserialize(&network).expect("safetensors");
    let mut names = tensors.names();
    names.sort_unstable();
    assert_eq!(names, ["head.bias", "head.weight", "hidden.bias", "hidden.weight"]);
    assert_eq!(tensors.tensor("hidden.weight").expect("it is there").shape(), [32, 3]);
}

#[test]
fn a_killed_worker_changes_no_bit() {
    let toy = Toy::new(500);
    toy.train("undisturbed", &SHORT);
    for (name, phase) in [("forward", "forward"), ("backward", "backward"), ("optimizer", "optimizer")] {
        let held = toy.hold(1, phase, 3);
        let mut running = toy.start(name, &SHORT);
        running.wait_until_held(&held);
        signal(worker_of(running.pid(), 1).expect("it lives"), Signal::SIGKILL);
        let (status, printed) = running.finish();
        assert!(status.success(), "{phase}: {status}\n{printed}");
        assert!(toy.network(name) == toy.network("undisturbed"), "{phase}: it learned something else");
        toy.assert_audited(name, 8);
    }
}

#[test]
fn a_run_whose_launcher_was_killed_resumes_with_the_same_losses() {
    let toy = Toy::new(500);
    let (whole, _) = toy.train("whole", &SHORT);
    // Its steps take less than a millisecond: without a hold it would be over before it is killed.
    let held = toy.hold(0, "forward", 5);
    let mut running = toy.start("halves", &SHORT);
    running.wait_until_held(&held);
    drop(running);
    let (resumed, _) = toy.train("halves", &SHORT);
    let first = resumed["first_step"].as_u64().expect("a number") as usize;
    assert!((4..8).contains(&first), "resumed at {first}");
    assert_eq!(losses(&whole)[first..], losses(&resumed));
    assert!(toy.network("halves") == toy.network("whole"), "it learned something else");
    toy.assert_audited("halves", 8);
}

/// Rows of a rank in a step, wide enough for activations to be most of what is held.
const WIDE: [&str; 4] = ["network.width=2048", "train.global_batch=4096", "eval.samples=16", "train.steps=3"];

#[test]
fn a_step_that_does_not_fit_goes_on_with_half_the_micro_batch_and_the_same_numbers() {
    let toy = Toy::new(6_000);
    let run = |name, overrides: &[&str]| toy.train(name, &[&WIDE[..], overrides].concat());
    let whole = planned(&toy, &[&WIDE[..], &["train.micro_batch=2048"]].concat());
    let capacity = format!("memory.capacity={}", whole * 3 / 4);
    let (_, printed) = run("cramped", &["train.micro_batch=2048", &capacity]);
    let message =
        "all ranks go from a micro-batch of 2048 to 1024 from step 0 on, with the same samples in each step";
    assert!(printed.contains(message), "{printed}");
    let (_, printed) = run("roomy", &["train.micro_batch=1024", &capacity]);
    assert!(!printed.contains("out of memory"), "{printed}");
    assert!(toy.network("cramped") == toy.network("roomy"), "it learned something else");
    toy.assert_audited("cramped", 3);
}

/// The peak that `cox-toy plan` predicts for a rank.
fn planned(toy: &Toy, overrides: &[&str]) -> u64 {
    let told = toy.plan(&[&["--json"], overrides].concat());
    let plan: Value = serde_json::from_str(&told).unwrap_or_else(|error| panic!("{error}: {told}"));
    let peak = plan.pointer("/memories/0/current/peak").and_then(Value::as_u64);
    peak.unwrap_or_else(|| panic!("no peak: {plan:#}"))
}

#[test]
fn recompute_changes_no_bit() {
    let toy = Toy::new(500);
    toy.train("kept", &SHORT);
    toy.train("again", &[&SHORT[..], &["train.recompute=full"]].concat());
    assert!(toy.network("kept") == toy.network("again"));
}

#[test]
fn the_plan_says_what_the_run_then_takes() {
    for recompute in ["train.recompute=none", "train.recompute=full"] {
        // Another one has learned nothing from this one.
        let toy = Toy::new(6_000);
        let overrides = [&WIDE[..], &["train.micro_batch=2048", recompute]].concat();
        let (summary, _) = toy.train(recompute, &overrides);
        let number = |field: &str| summary["memory"][field].as_f64().expect(field);
        let (predicted, measured) = (number("predicted"), number("measured"));
        assert!((predicted / measured - 1.0).abs() < 0.1, "{recompute}: {predicted} for {measured}");
    }
    let told = Toy::new(6_000).plan(&[]);
    assert!(told.contains("161 parameters trained") && told.contains("6,000 rows of 3 inputs"), "{told}");
    // 64 rows; two products of 3 x 32 and three of 32 x 1.
    assert!(told.contains("36.9 kFLOP a step: 16.4 kFLOP forward, 20.5 kFLOP backward"), "{told}");
}

#[test]
fn peaks_begin_anew_where_people_ask_for_it_and_the_runs_own_stay() {
    let toy = Toy::new(500);
    let held = toy.hold(0, "forward", 20);
    // Longer than anybody asks it anything; it is stopped.
    let mut running = toy.start("run", &["train.steps=10000000", "train.log_every=100000"]);
    running.wait_until_held(&held);
    std::fs::remove_file(held).expect("it is held");
    let ask = |arguments: &[&str]| {
        let answer =
            toy.cox(arguments).arg("--run").arg(toy.path("run")).output().expect("cox-toy was built");
        let told = String::from_utf8_lossy(&answer.stdout).into_owned();
        assert!(answer.status.success(), "{told}\n{}", String::from_utf8_lossy(&answer.stderr));
        told
    };
    let phases = |flag: &str| {
        let told: Value = serde_json::from_str(&ask(&["memory", "--json", flag])).expect("one JSON object");
        let phases = told.pointer("/ranks/1/phases").and_then(Value::as_array).expect("an array").clone();
        phases.iter().map(|of| of["phase"].as_str().expect("a name").to_owned()).collect::<Vec<_>>()
    };
    let has = |phases: &[String], phase: &str| phases.iter().any(|of| of.ends_with(phase));
    // What this answer tells is of the time before.
    let before = phases("--reset");
    assert!(has(&before, "loading") && has(&before, "forward"), "{before:?}");
    let since = phases("--refresh");
    assert!(!has(&since, "loading") && has(&since, "forward"), "{since:?}");
    ask(&["stop"]);
    let (status, printed) = running.finish();
    assert!(status.success(), "{status}\n{printed}");
    let summary = read_json(&toy.path("run/summary.json"));
    let of_run = &summary["peak_memory"][1]["phases"]["loading"]["in_use"];
    assert!(of_run.as_u64() > Some(0), "{summary:#}");
}

#[test]
fn metrics_show_the_tasks_own_stages_and_figures() {
    let toy = Toy::new(500);
    let (held, address) = (toy.hold(0, "forward", 4), free_endpoint());
    let listen = format!("launch.listen={address}");
    let mut running = toy.start("run", &[&SHORT[..], &[&listen]].concat());
    running.wait_until_held(&held);
    // The reports of the steps before are on their way.
    let metrics = processes::wait_for("a committed step in /metrics", || {
        let metrics = get(&address, "/metrics", &toy.path("run"));
        (!metrics.contains("coxswain_steps_committed 0.0")).then_some(metrics)
    });
    for family in [
        "coxswain_step_part_time_seconds{part=\"hidden\"} ",
        "coxswain_step_part_time_seconds{part=\"head\"} ",
        "coxswain_metric_residual{of=\"max\"} ",
        "coxswain_metric_lr{of=\"network\"} ",
        "coxswain_metric_grad_norm{of=\"network\"} ",
    ] {
        let line = metrics.lines().find_map(|line| line.strip_prefix(family));
        let value = line.unwrap_or_else(|| panic!("no {family}:\n{metrics}"));
        assert!(value.parse::<f64>().is_ok_and(|value| value > 0.0), "{family}{value}");
    }
    std::fs::remove_file(held).expect("it is held");
    let (status, printed) = running.finish();
    assert!(status.success(), "{printed}");
}
