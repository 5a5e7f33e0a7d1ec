//! Held-out samples while training goes on, the best checkpoint, and what may change at a resume.

use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::{
    processes::{self, signal, worker_of},
    support::{LaunchProcess, Toy, free_endpoint, get, read_json, refused},
};

const RUN: [&str; 4] =
    ["train.steps=12", "train.checkpoint_every=4", "train.keep_checkpoints=1", "optimizer.warmup_steps=2"];
const EVERY: &str = "eval.every=3";

fn with<'a>(more: &[&'a str]) -> Vec<&'a str> {
    [&RUN[..], more].concat()
}

fn kill(toy: &Toy, mut running: LaunchProcess, held: &std::path::Path) -> String {
    running.wait_until_held(held);
    signal(worker_of(running.pid(), 1).expect("it lives"), Signal::SIGKILL);
    let (status, printed) = running.finish();
    assert!(status.success(), "{status}\n{printed}");
    std::fs::remove_dir_all(toy.path("hold")).expect("it is there");
    printed
}

#[test]
fn looking_at_held_out_samples_changes_no_bit_and_keeps_the_best() {
    let toy = Toy::new(500);
    toy.train("without", &with(&["eval.samples=0"]));
    let (summary, printed) = toy.train("with", &with(&[EVERY, "eval.batch=7", "eval.seed=9"]));
    assert!(toy.network("with") == toy.network("without"), "it learned something else");
    for step in [3, 6, 9, 12] {
        assert!(printed.contains(&format!("held-out error after step {step}: mse ")), "{printed}");
    }
    toy.assert_audited("with", 12);
    let best = read_json(&toy.path("with/best.json"));
    let step = best["step"].as_u64().expect("a number");
    assert_eq!((&best["measure"], &best["artifacts"]), (&json!("mse"), &json!("best")), "{best}");
    assert!(best["value"].as_f64() < summary["error_before"]["mse"].as_f64(), "{best} {summary:#}");
    let kept = toy.path("with").join(best["checkpoint"].as_str().expect("a path")).join("manifest.json");
    assert_eq!(read_json(&kept)["step"], step);
    assert!(toy.path("with/best/network.safetensors").is_file());

    // What is exported is what a run leaves that ends there.
    let steps = format!("train.steps={step}");
    toy.train("short", &with(&[&steps, "optimizer.schedule=constant"]));
    toy.train("long", &with(&[EVERY, "optimizer.schedule=constant"]));
    let long = read_json(&toy.path("long/best.json"));
    if long["step"] == step {
        let exported = std::fs::read(toy.path("long/best/network.safetensors")).expect("it is there");
        assert!(exported == toy.network("short"), "it is another state");
    }
}

#[test]
fn a_worker_that_is_killed_while_all_look_costs_that_look_and_nothing_else() {
    let toy = Toy::new(500);
    toy.train("undisturbed", &with(&[EVERY]));
    let best = read_json(&toy.path("undisturbed/best.json"));
    for (name, phase) in [("looking", "evaluation"), ("saving", "checkpoint")] {
        let held = toy.hold(1, phase, 6);
        let printed = kill(&toy, toy.start(name, &with(&[EVERY])), &held);
        assert!(printed.contains("held-out error after step 6: "), "{phase}: {printed}");
        assert!(toy.network(name) == toy.network("undisturbed"), "{phase}: it learned something else");
        assert_eq!(read_json(&toy.path(name).join("best.json")), best, "{phase}: {printed}");
        toy.assert_audited(name, 12);
    }
}

#[test]
fn what_was_found_is_shown_until_there_is_something_newer() {
    let toy = Toy::new(500);
    let (held, address) = (toy.hold(0, "forward", 5), free_endpoint());
    let listen = format!("launch.listen={address}");
    let mut running = toy.start("run", &with(&[EVERY, &listen]));
    running.wait_until_held(&held);
    let metrics = processes::wait_for("the fifth step in /metrics", || {
        let metrics = get(&address, "/metrics", &toy.path("run"));
        metrics.contains("coxswain_steps_committed 5.0").then_some(metrics)
    });
    for family in [
        "coxswain_metric_eval{of=\"mse\"} ",
        "coxswain_metric_eval{of=\"mae\"} ",
        "coxswain_metric_best{of=\"step\"} 3",
    ] {
        assert!(metrics.lines().any(|line| line.starts_with(family)), "no {family}:\n{metrics}");
    }
    let output = toy.path("run").display().to_string();
    let answer = toy.cox(&["status", "--run", &output]).output().expect("cox-toy was built");
    let told = String::from_utf8_lossy(&answer.stdout);
    assert!(told.contains("held out: mse ") && told.contains("best after step 3"), "{told}");
    std::fs::remove_file(held).expect("it is held");
    assert!(running.finish().0.success());
}

#[test]
fn rates_and_places_may_change_at_a_resume_and_the_batch_may_not() {
    let toy = Toy::new(500);
    toy.train("run", &with(&["train.steps=6"]));
    let moved = toy.path("moved.parquet");
    std::fs::rename(toy.path("table.parquet"), &moved).expect("a file");
    let path = format!("data.path={}", moved.display());
    let changed = ["optimizer.lr.network=0.0005", "eval.samples=5", "eval.every=4", &path];
    let (_, printed) = toy.train("run", &with(&changed));
    for line in [
        "changed at step 6: optimizer.lr.network from ",
        "changed at step 6: data.path from ",
        "changed at step 6: train.steps from 6 to 12",
    ] {
        assert!(printed.contains(line), "{line}\n{printed}");
    }
    assert!(
        printed.contains("the run's length changed from 6 to 12 steps; the learning-rate schedule"),
        "{printed}"
    );
    let audit = toy.assert_audited("run", 12);
    let keys = |audit: &Value| {
        let changes = audit["changes"].as_array().expect("an array").clone();
        changes.into_iter().map(|change| (change["step"].clone(), change["key"].clone())).collect::<Vec<_>>()
    };
    let due = ["data.path", "eval.every", "eval.samples", "optimizer.lr.network", "train.steps"]
        .map(|key| (json!(6), json!(key)));
    assert_eq!(keys(&audit), due, "{audit:#}");
    // Said again, nothing changes any more.
    toy.train("run", &with(&changed));
    assert_eq!(keys(&toy.assert_audited("run", 12)), due);

    let other = with(&["optimizer.lr.network=0.0001", "train.global_batch=32", &path]);
    let (code, printed) = refused(toy.command("run", &other));
    assert_eq!(code, Some(2), "{printed}");
    assert!(printed.contains("train.global_batch (64 there, 32 here)"), "{printed}");
    assert!(!printed.contains("optimizer.lr.network"), "what may change is no reason: {printed}");
}

#[test]
fn another_data_set_is_refused_at_launch_with_what_was_seen_and_what_to_do() {
    let toy = Toy::new(500);
    toy.train("run", &with(&["train.steps=6"]));
    let records = std::fs::read(toy.path("run/logs/coordinator.log")).expect("a file");
    let (other, before) = (Toy::new(400), toy.path("table.parquet"));
    let path = format!("data.path={}", other.path("table.parquet").display());
    let (code, printed) = refused(toy.command("run", &with(&[&path])));
    assert_eq!(code, Some(3), "{printed}");
    for told in [
        &format!("{}: not the data set that this run has trained on", path.replace('=', " ")),
        "training samples; the run's data set had fingerprint ",
        &format!("training samples (data.path {})", before.display()),
        "Set data.path to that data set (it may have been moved)",
    ] {
        assert!(printed.contains(told), "{told}: {printed}");
    }
    let after = std::fs::read(toy.path("run/logs/coordinator.log")).expect("a file");
    assert!(after == records, "a coordinator was started: {printed}");
    toy.train("run", &with(&[]));
}

#[test]
fn a_run_and_what_it_began_with_may_be_moved_and_the_content_may_not_change() {
    let toy = Toy::new(500);
    let from = |name: &str| format!("train.init_from={}", toy.path(name).display());
    toy.train("first", &with(&["train.steps=4"]));
    toy.train("other", &with(&["train.steps=4", "run.seed=99"]));
    toy.train("run", &with(&["train.steps=6", &from("first")]));
    let (code, printed) = refused(toy.command("run", &with(&[&from("other")])));
    assert_eq!(code, Some(2), "{printed}");
    assert!(printed.contains("train.init_digest ("), "{printed}");
    std::fs::rename(toy.path("first"), toy.path("one")).expect("a directory");
    std::fs::rename(toy.path("run"), toy.path("moved")).expect("a directory");
    let (summary, printed) = toy.train("moved", &with(&[&from("one")]));
    assert_eq!(summary["first_step"], 6, "{printed}");
    for key in ["run.output_dir", "train.init_from", "train.steps"] {
        assert!(printed.contains(&format!("changed at step 6: {key} from ")), "{key}: {printed}");
    }
    toy.assert_audited("moved", 12);
}

/// The average, of artifacts below `name`.
fn averaged(toy: &Toy, name: &str) -> Vec<u8> {
    let path = toy.path(name).join("network.safetensors");
    std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

#[test]
fn the_average_of_the_weights_has_the_same_bits_whatever_befalls_the_ranks() {
    let toy = Toy::new(500);
    let kept = with(&[EVERY, "optimizer.ema_decay=0.9"]);
    toy.train("without", &with(&[EVERY]));
    let (summary, printed) = toy.train("undisturbed", &kept);
    assert!(toy.network("undisturbed") == toy.network("without"), "it learned something else");
    let due = averaged(&toy, "undisturbed/ema");
    assert!(due != toy.network("undisturbed"), "an average of all steps is not the last one");
    assert!(printed.contains(", ema/mse "), "{printed}");
    assert!(summary["error_after_ema"]["mse"].is_number(), "{summary:#}");
    assert_eq!(read_json(&toy.path("undisturbed/ema/manifest.json"))["steps"], 12);
    assert!(toy.path("undisturbed/ema/run_spec.json").is_file(), "it can be served by itself");
    let exported = |more: &[&str], to: &str| {
        let mut command = toy.cox(&[&["export", "--ema"][..], more].concat());
        let answer = command.arg("--out").arg(toy.path(to)).arg(toy.path("undisturbed"));
        let answer = answer.output().expect("cox-toy was built");
        assert!(answer.status.success(), "{}", String::from_utf8_lossy(&answer.stderr));
        averaged(&toy, to)
    };
    assert!(exported(&[], "newest") == due, "a checkpoint has another one");
    let best = averaged(&toy, "undisturbed/best/ema");
    assert!(best == exported(&["--step", "best"], "the-best"), "that of the best checkpoint is another one");
    assert!(!toy.path("undisturbed/.tmp-best").exists());
    // Without one at the end nothing is left of the one before.
    toy.train("undisturbed", &with(&[EVERY, "optimizer.ema_decay="]));
    assert!(!toy.path("undisturbed/ema").exists(), "an average of another end");

    let same = |name: &str, printed: &str| {
        assert!(averaged(&toy, &format!("{name}/ema")) == due, "{name}: another average\n{printed}");
        assert!(toy.network(name) == toy.network("without"), "{name}: it learned something else");
    };
    let held = toy.hold(1, "optimizer", 5);
    same("updating", &kill(&toy, toy.start("updating", &kept), &held));
    // While the average is where the weights were: the second look at held-out samples.
    let held = toy.hold(1, "evaluation", 6);
    let mut running = toy.start("looking", &kept);
    running.wait_until_held(&held);
    toy.hold(1, "evaluation", 6);
    std::fs::remove_file(&held).expect("it is held");
    same("looking", &kill(&toy, running, &held));

    // And where the launcher goes, too, and the checkpoint is read.
    let held = toy.hold(0, "forward", 10);
    let mut running = toy.start("halves", &kept);
    running.wait_until_held(&held);
    drop(running);
    std::fs::remove_dir_all(toy.path("hold")).expect("it is there");
    toy.train("halves", &kept);
    assert!(averaged(&toy, "halves/ema") == due, "another average");
}

#[test]
fn an_average_that_is_asked_for_later_begins_with_the_weights_of_the_checkpoint() {
    let toy = Toy::new(500);
    toy.train("run", &with(&["train.steps=8", "optimizer.schedule=constant"]));
    let mut command = toy.cox(&["export", "--ema"]);
    command.arg(toy.path("run"));
    let (code, printed) = refused(command);
    assert!(code != Some(0) && printed.contains("without `optimizer.ema_decay`"), "{code:?} {printed}");
    let (_, printed) = toy.train("run", &with(&["optimizer.schedule=constant", "optimizer.ema_decay=0.9"]));
    let told =
        "the checkpoint of step 8 has no average of the weights: the average starts from the current weights";
    assert!(printed.contains(told), "{printed}");
    assert!(averaged(&toy, "run/ema") != toy.network("run"));
}
