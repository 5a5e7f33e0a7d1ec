//! Runs whose rates are far too high: nothing of their state is kept, and a resume with lower rates ends as a
//! run that never had others.

use nix::sys::signal::Signal;
use serde_json::Value;

use crate::{
    processes::{signal, worker_of},
    support::{Toy, read_json},
};

const ROWS: usize = 500;
/// Rates that do not depend on where the run ends, so that all launches have the same.
const RUN: [&str; 5] = [
    "train.steps=20",
    "train.checkpoint_every=3",
    "train.max_skipped=4",
    "optimizer.schedule=constant",
    "eval.samples=20",
];

/// Names below a run's `checkpoints`, in order.
fn checkpoints(toy: &Toy, run: &str) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(toy.path(run).join("checkpoints")) else { return Vec::new() };
    let mut names: Vec<_> =
        entries.map(|entry| entry.expect("it is there").file_name().into_string().expect("text")).collect();
    names.sort();
    names
}

/// Runs it to an end with exit code 4; returns what was printed.
fn diverges(toy: &Toy, run: &str, overrides: &[&str]) -> String {
    let (status, printed) = toy.start(run, &[&RUN[..], overrides].concat()).finish();
    assert_eq!(status.code(), Some(4), "{printed}");
    printed
}

#[test]
fn a_first_update_that_spoils_the_weights_leaves_neither_results_nor_checkpoints() {
    let toy = Toy::new(ROWS);
    for (run, rate, told) in [
        ("infinite", "1e300", "the run has diverged: after 1 steps weights are not finite"),
        ("beyond", "1e38", "the run has diverged: after 1 steps weights are not finite, or beyond 1.8e19"),
    ] {
        let printed = diverges(&toy, run, &["train.steps=1", &format!("optimizer.lr.network={rate}")]);
        assert!(printed.contains(told) && printed.contains("the run starts over"), "{printed}");
        assert!(!toy.path(run).join("network.safetensors").exists(), "{printed}");
        assert!(!toy.path(run).join("summary.json").exists(), "{printed}");
        assert!(checkpoints(&toy, run).iter().all(|name| name.contains(".diverged-")), "{printed}");
        // The remedy.
        toy.train(run, &[&RUN[..], &["optimizer.lr.network=0.001"]].concat());
        toy.assert_audited(run, 20);
    }
}

#[test]
fn a_run_that_diverges_goes_on_from_its_last_good_checkpoint_with_lower_rates() {
    let toy = Toy::new(ROWS);
    toy.train("undisturbed", &RUN);
    for (run, rate, told) in [
        ("infinite", "1e300", "the run has diverged: after 7 steps weights are not finite"),
        ("beyond", "1e30", "the run has diverged: after 7 steps weights are not finite, or beyond 1.8e19"),
        // Finite, and saved: of these weights no loss is finite.
        ("finite", "1e18", "5 steps in a row were left out, up to step 11"),
    ] {
        toy.train(run, &[&RUN[..], &["train.steps=6"]].concat());
        let printed = diverges(&toy, run, &[&format!("optimizer.lr.network={rate}")]);
        assert!(printed.contains(told), "{rate}: {printed}");
        assert!(printed.contains("the run resumes from checkpoints/step-00000006"), "{rate}: {printed}");
        let kept = checkpoints(&toy, run);
        let good: Vec<_> = kept.iter().filter(|name| !name.contains(".diverged-")).collect();
        assert_eq!(good.last().map(|name| name.as_str()), Some("step-00000006"), "{kept:?}\n{printed}");

        let (summary, printed) = toy.train(run, &RUN);
        assert_eq!(summary["first_step"], 6, "{printed}");
        assert!(toy.network(run) == toy.network("undisturbed"), "{rate}: it learned something else");
        toy.assert_audited(run, 20);
        let error = |key: &str| {
            read_json(&toy.path(run).join("summary.json"))[key]["mse"].as_f64().expect("a number")
        };
        assert!(error("error_after") < error("error_before"), "{rate}");
    }
}

#[test]
fn the_newest_good_checkpoint_is_not_pruned_though_newer_ones_are_complete() {
    let toy = Toy::new(ROWS);
    toy.train("run", &[&RUN[..], &["train.steps=6"]].concat());
    let endless = ["train.max_skipped=100", "train.keep_checkpoints=2", "eval.samples=0"];
    // Every step behind the seventh is left out, to the end: 9, 12, 15, 18 and 20 are saved.
    let overrides = [&RUN[..], &endless, &["optimizer.lr.network=1e18"]].concat();
    let (_, printed) = toy.start("run", &overrides).finish();
    let kept = checkpoints(&toy, "run");
    assert!(kept.contains(&"step-00000006".to_owned()), "{kept:?}\n{printed}");
    let manifest =
        |name: &str| -> Value { read_json(&toy.path("run/checkpoints").join(name).join("manifest.json")) };
    assert_eq!(manifest("step-00000006")["step"], 6);
}

/// A row whose loss is finite, and a thousand times that of others; five epochs of eight steps.
const SPIKED: [&str; 4] =
    ["train.steps=40", "train.checkpoint_every=6", "optimizer.warmup_steps=2", "eval.samples=0"];

#[test]
fn a_step_whose_loss_is_far_above_the_others_is_left_out_where_a_key_says_so() {
    let toy = Toy::with_huge_row(ROWS, 123, 1e4);
    let skip = [&SPIKED[..], &["train.spike=skip"]].concat();
    let (_, printed) = toy.train("run", &skip);
    let audit = toy.assert_audited("run", 40);
    let skipped = audit["skipped"].as_array().expect("an array");
    assert!((1..=4).contains(&skipped.len()), "once an epoch, when enough is known: {audit:#}\n{printed}");
    assert!(skipped.iter().all(|of| of["cause"] == "spike"), "{audit:#}");
    assert!(printed.contains("left out: its loss is far above those of the steps before"), "{printed}");

    // What is far is the same after a fault, and after a resume.
    let first = skipped[0]["step"].as_u64().expect("a number");
    let held = toy.hold(1, "forward", first - 1);
    let mut running = toy.start("killed", &skip);
    running.wait_until_held(&held);
    signal(worker_of(running.pid(), 1).expect("it lives"), Signal::SIGKILL);
    let (status, printed) = running.finish();
    assert!(status.success(), "{status}\n{printed}");
    assert!(toy.network("killed") == toy.network("run"), "it learned something else\n{printed}");
    let held = toy.hold(0, "forward", first - 1);
    let mut running = toy.start("halves", &skip);
    running.wait_until_held(&held);
    drop(running);
    std::fs::remove_dir_all(toy.path("hold")).expect("it is there");
    let (_, printed) = toy.train("halves", &skip);
    assert!(toy.network("halves") == toy.network("run"), "it learned something else\n{printed}");

    toy.train("taken", &SPIKED);
    assert!(toy.network("taken") != toy.network("run"), "nothing was left out");
    let (status, printed) = toy.start("ended", &[&SPIKED[..], &["train.spike=end"]].concat()).finish();
    assert_eq!(status.code(), Some(4), "{printed}");
    assert!(printed.contains(&format!("the loss of step {first} is ")), "{printed}");
    assert!(printed.contains("the run resumes from checkpoints/step-"), "{printed}");
}
