//! Numbers that are not finite: a step is tried once more, then left out, and the run goes on.

use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::{
    processes::{coordinator_of, signal, wait_for, wait_until_gone, worker_of},
    support::{Toy, read_json},
};

/// Two epochs of eight steps.
const RUN: [&str; 4] =
    ["train.steps=16", "train.checkpoint_every=3", "optimizer.warmup_steps=2", "eval.samples=0"];
const ROWS: usize = 500;
const ROW: usize = 123;

/// The steps that were left out, in order.
fn skipped(audit: &Value) -> Vec<u64> {
    let skipped = audit["skipped"].as_array().expect("an array");
    skipped.iter().map(|of| of["step"].as_u64().expect("a number")).collect()
}

/// One row's inputs spoil the loss, or the gradient alone: the steps that have it are left out.
fn a_huge_row_is_left_out(value: f64, cause: &str, network: &str) {
    let toy = Toy::with_huge_row(ROWS, ROW, value);
    let (_, printed) = toy.train("run", &[&RUN[..], &[network]].concat());
    let audit = toy.assert_audited("run", 16);
    let steps = skipped(&audit);
    assert_eq!(steps.len(), 2, "once an epoch: {audit:#}\n{printed}");
    for found in audit["skipped"].as_array().expect("an array") {
        assert_eq!(
            (&found["cause"], &found["samples"]),
            (&json!(cause), &json!([ROW])),
            "{audit:#}\n{printed}"
        );
    }
    let samples: u64 = audit["epochs"][0]["skipped"]
        .as_array()
        .expect("an array")
        .iter()
        .map(|range| {
            let end = |end: usize| range[end].as_u64().expect("a number");
            end(1) - end(0)
        })
        .sum();
    assert!(samples > 0 && samples <= 64, "{audit:#}");
    let told = format!("left out: its {cause} was not finite in either of two attempts (sample {ROW})");
    assert_eq!(printed.matches(&told).count(), 2, "{printed}");
    assert_eq!(printed.matches("runs once more").count(), 2, "{printed}");

    it_is_learned_the_same(&toy, &[network], &steps);
}

/// By a run that is told these steps beforehand, one that loses a worker, and one that is resumed.
fn it_is_learned_the_same(toy: &Toy, keys: &[&str], steps: &[u64]) {
    // Told beforehand, the run never sees the row, and learns the same.
    let named = format!("train.skip_steps=[{}, {}]", steps[0], steps[1]);
    let (_, printed) = toy.train("told", &[&RUN[..], keys, &[&named]].concat());
    assert!(!printed.contains("once more"), "{printed}");
    assert_eq!(skipped(&toy.assert_audited("told", 16)), steps);
    assert!(toy.network("told") == toy.network("run"), "it learned something else");

    // And so does one that loses a worker right behind the first of these steps.
    let held = toy.hold(1, "forward", steps[0] + 1);
    let mut running = toy.start("killed", &[&RUN[..], keys].concat());
    running.wait_until_held(&held);
    signal(worker_of(running.pid(), 1).expect("it lives"), Signal::SIGKILL);
    let (status, printed) = running.finish();
    assert!(status.success(), "{status}\n{printed}");
    assert!(toy.network("killed") == toy.network("run"), "it learned something else\n{printed}");
    assert_eq!(skipped(&toy.assert_audited("killed", 16)), steps);

    // Or is killed as a whole, and resumed from a checkpoint behind it.
    let held = toy.hold(0, "forward", 15);
    let mut running = toy.start("halves", &[&RUN[..], keys].concat());
    running.wait_until_held(&held);
    wait_for("the reports of the steps before", || (skipped(&toy.audit("halves").1) == steps).then_some(()));
    drop(running);
    std::fs::remove_dir_all(toy.path("hold")).expect("it is there");
    toy.train("halves", &[&RUN[..], keys].concat());
    assert!(toy.network("halves") == toy.network("run"), "it learned something else");
    assert_eq!(skipped(&toy.assert_audited("halves", 16)), steps);
}

#[test]
fn a_gradient_that_overflows_where_the_loss_is_scaled_costs_its_steps_and_lowers_the_scale() {
    let toy = Toy::with_huge_row(ROWS, ROW, 1e30);
    let keys = ["network.width=32", "optimizer.loss_scale={initial: 1024, growth_interval: 1000}"];
    let (_, printed) = toy.train("run", &[&RUN[..], &keys].concat());
    assert!(printed.contains("the loss is scaled by 1024 in the next step"), "{printed}");
    assert!(!printed.contains("once more"), "it is not tried again: {printed}");
    let audit = toy.assert_audited("run", 16);
    let steps = skipped(&audit);
    assert_eq!(steps.len(), 2, "once an epoch: {audit:#}\n{printed}");
    for found in audit["skipped"].as_array().expect("an array") {
        assert_eq!((&found["cause"], &found["samples"]), (&json!("overflow"), &json!([])), "{audit:#}");
    }
    it_is_learned_the_same(&toy, &keys, &steps);
    // Whichever rank was given it, the scale is the same in the end.
    let end = scale_at_the_end(&toy, "run");
    assert_eq!(end, "8", "halved twice, from 2^10");
    for other in ["killed", "halves"] {
        assert_eq!(scale_at_the_end(&toy, other), end, "{other}");
    }

    // In float32 scaling changes no bit of what is learned.
    let named = format!("train.skip_steps=[{}, {}]", steps[0], steps[1]);
    toy.train("unscaled", &[&RUN[..], &["network.width=32", &named]].concat());
    assert!(toy.network("unscaled") == toy.network("run"), "it learned something else");

    // At the least scale the number is at fault.
    let least = "optimizer.loss_scale={initial: 1, growth_interval: 1000}";
    let (_, printed) = toy.train("least", &[&RUN[..], &["network.width=32", least]].concat());
    let causes: Vec<_> = toy.assert_audited("least", 16)["skipped"].as_array().expect("an array").clone();
    assert!(causes.iter().all(|found| found["cause"] == "gradient"), "{causes:?}\n{printed}");
    assert_eq!(printed.matches("runs once more").count(), 2, "{printed}");
}

/// The power of two that the loss scale is in the newest checkpoint of a run, of all its ranks.
fn scale_at_the_end(toy: &Toy, run: &str) -> String {
    let newest = toy.path(&format!("{run}/checkpoints/step-00000016"));
    let files = std::fs::read_dir(newest).expect("the last step has a checkpoint");
    let files = files.map(|file| std::fs::read(file.expect("it is there").path()).expect("it can be read"));
    let scales = files.filter_map(|bytes| {
        let text = String::from_utf8_lossy(&bytes).into_owned();
        let (_, from) = text.split_once("\"loss_scale_exponent\":\"")?;
        Some(from.split_once('"').expect("JSON").0.to_owned())
    });
    let scales: std::collections::BTreeSet<String> = scales.collect();
    assert_eq!(scales.len(), 1, "all ranks have one: {scales:?}");
    scales.into_iter().next().expect("one")
}

#[test]
fn a_row_that_spoils_the_gradient_costs_its_steps_and_nothing_else() {
    a_huge_row_is_left_out(1e30, "gradient", "network.width=32");
}

#[test]
fn a_row_that_spoils_the_loss_costs_its_steps_and_nothing_else() {
    a_huge_row_is_left_out(3.4e38, "loss", "network.width=4");
}

#[test]
fn a_slip_that_does_not_come_back_changes_no_bit() {
    let toy = Toy::new(ROWS);
    toy.train("undisturbed", &RUN);
    let mut command = toy.command("slipped", &RUN);
    command.env("COX_FAULT_LOSS", "rank=1 step=5 times=1");
    let (status, printed) = toy.start_of(command).finish();
    assert!(status.success(), "{status}\n{printed}");
    assert!(printed.contains("step 5: the loss is finite the second time"), "{printed}");
    assert!(toy.network("slipped") == toy.network("undisturbed"), "it learned something else");
    let audit = toy.assert_audited("slipped", 16);
    assert_eq!((skipped(&audit), &audit["retried_steps"]), (vec![], &json!(1)), "{audit:#}");
}

#[test]
fn a_step_that_was_left_out_and_told_to_nobody_is_known_from_its_checkpoint() {
    let toy = Toy::new(ROWS);
    let mut command = toy.command("run", &RUN);
    command.env("COX_FAULT_LOSS", "rank=1 step=4 times=2");
    let held = toy.hold(0, "forward", 3);
    let mut running = toy.start_of(command);
    running.wait_until_held(&held);
    // The coordinator hears nothing any more, and workers go on, past a checkpoint at step 6.
    let coordinator = coordinator_of(running.pid()).expect("it lives");
    signal(coordinator, Signal::SIGSTOP);
    let later = toy.hold(0, "backward", 7);
    std::fs::remove_file(&held).expect("it is held");
    running.wait_until_held(&later);
    let workers = [0, 1].map(|rank| worker_of(running.pid(), rank).expect("it lives"));
    drop(running);
    wait_until_gone(&[workers[0], workers[1], coordinator]);
    assert!(skipped(&toy.audit("run").1).is_empty(), "nobody has told");
    std::fs::remove_dir_all(toy.path("hold")).expect("it is there");
    let (summary, printed) = toy.train("run", &RUN);
    assert_eq!(summary["first_step"], 6, "{printed}");
    let audit = toy.assert_audited("run", 16);
    assert_eq!((skipped(&audit), &audit["skipped"][0]["cause"]), (vec![4], &json!("loss")), "{audit:#}");
}

#[test]
fn survivors_of_a_spent_budget_save_what_they_have_and_a_resume_goes_on_from_there() {
    let toy = Toy::new(ROWS);
    let sparse = [&RUN[..], &["train.checkpoint_every=0"]].concat();
    // Two kills, and one may be survived.
    let limited = [&["--nproc-per-node=3", "--max-restarts=1"], &sparse[..]].concat();
    toy.train("undisturbed", &limited);
    let held = [(1, 4), (2, 9)].map(|(rank, step)| toy.hold(rank, "backward", step));
    let mut running = toy.start("run", &limited);
    for (rank, held) in [1, 2].into_iter().zip(&held) {
        running.wait_until_held(held);
        signal(worker_of(running.pid(), rank).expect("it lives"), Signal::SIGKILL);
    }
    let (status, printed) = running.finish();
    assert_eq!(status.code(), Some(4), "{printed}");
    assert!(printed.contains("checkpoint at step 9"), "{printed}");
    assert!(printed.contains("start again to resume from checkpoints/step-00000009"), "{printed}");
    let audit = toy.audit("run").1;
    assert_eq!((&audit["committed_steps"], &audit["missing"]), (&json!(9), &json!(0)), "{audit:#}");
    std::fs::remove_dir_all(toy.path("hold")).expect("it is there");
    let (summary, printed) = toy.train("run", &limited);
    assert_eq!(summary["first_step"], 9, "{printed}");
    toy.assert_audited("run", 16);
    assert!(
        toy.network("run") == toy.network("undisturbed"),
        "two ranks have saved something else than three had"
    );
}

#[test]
fn too_many_in_a_row_end_the_run_and_a_resume_goes_on_from_before_the_first_of_them() {
    let toy = Toy::new(ROWS);
    let mut command = toy.command("run", &[&RUN[..], &["train.max_skipped=3"]].concat());
    command.env("COX_FAULT_LOSS", "rank=1 step=5 times=1000");
    let (status, printed) = toy.start_of(command).finish();
    assert_eq!(status.code(), Some(4), "{printed}");
    assert!(printed.contains("4 steps in a row were left out, up to step 8"), "{printed}");
    assert!(!printed.contains("checkpoint at step 9"), "{printed}");
    // From step 6 on none was taken.
    assert!(printed.contains("the run resumes from checkpoints/step-00000003"), "{printed}");
    assert!(toy.path("run/checkpoints/step-00000006.diverged-1").is_dir(), "{printed}");
    let (_, printed) = toy.train("run", &[&RUN[..], &["train.max_skipped=3"]].concat());
    assert_eq!(read_json(&toy.path("run/summary.json"))["first_step"], 3, "{printed}");
    assert!(skipped(&toy.assert_audited("run", 16)).is_empty());

    toy.train("undisturbed", &RUN);
    assert!(toy.network("undisturbed") == toy.network("run"), "it learned something else");
}
