//! A rank that is slower than the others is named, and replaced where a spare is there and that is wanted.
//!
//! A process of its own, and one test after the other: beside four other ranks on two cores any of them is
//! slow, and rightly named.

use std::sync::{Mutex, PoisonError};

use support::{CoxProcess, read_json, tiny::audit};

#[allow(dead_code, reason = "shared with the tests of real processes")]
#[path = "../processes/support/mod.rs"]
mod support;

/// Held while ranks are timed.
static ALONE: Mutex<()> = Mutex::new(());

#[test]
fn a_rank_that_is_slowed_down_is_named_with_what_takes_longer_and_told_when_it_keeps_up() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let dir = tempfile::tempdir().unwrap();
    let output = dir.path().join("run");
    let output_dir = format!("run.output_dir={}", output.display());
    let arguments = ["run", "configs/quickstart.yaml", &output_dir, "train.steps=120", "eval.samples=0"];
    // Far beyond what a busy machine does to one rank's compute; how little is enough, the coordinator's own
    // tests say.
    let fault = [("COX_FAULT_SLOW", "rank=1 step=8 until=36 percent=300 part=data")];
    let (status, printed) = CoxProcess::start_with(&arguments, &fault).finish();
    assert!(status.success(), "{printed}");
    let lines: Vec<&str> = printed.lines().collect();
    let place = |text: &str| lines.iter().position(|line| line.contains(text));
    let named = place("rank 1 is slow: ").unwrap_or_else(|| panic!("{printed}"));
    assert!(lines[named].contains("mostly in data"), "{}", lines[named]);
    let twenty = place("28/120").unwrap_or_else(|| panic!("{printed}"));
    assert!(named < twenty, "step 27 is the twentieth that is slow: {printed}");
    assert!(place("rank 1 is no longer slow").is_some_and(|well| well > named), "{printed}");
    assert_eq!(read_json(&output.join("summary.json"))["steps"], 120);
}

#[test]
fn a_rank_that_stays_slow_is_replaced_by_a_spare_and_steps_take_as_long_as_before() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let dir = tempfile::tempdir().unwrap();
    let run = |name: &str, more: &[&str], fault: &[(&str, &str)]| {
        let output = dir.path().join(name);
        let output_dir = format!("run.output_dir={}", output.display());
        let keys = ["run", "configs/quickstart.yaml", &output_dir, "train.steps=100", "eval.samples=0"];
        let (status, printed) = CoxProcess::start_with(&[&keys[..], more].concat(), fault).finish();
        assert!(status.success(), "{printed}");
        (output, printed)
    };
    let spare = ["--nproc-per-node=3", "--spares=1", "faults.replace_slow=1"];
    let fault = [("COX_FAULT_SLOW", "rank=1 step=8 until=100 percent=200 part=compute")];
    let (output, printed) = run("replaced", &spare, &fault);
    let lines: Vec<&str> = printed.lines().collect();
    let place = |text: &str| {
        let found = lines.iter().position(|line| line.contains(text));
        found.unwrap_or_else(|| panic!("{text} is not told: {printed}"))
    };
    let (named, replaced) = (place("rank 1 is slow: "), place("rank 1 is slow and is replaced by a spare"));
    assert!(named < replaced && replaced < place("rank 2, a spare, takes part from now on"), "{printed}");
    let (undisturbed, _) = run("undisturbed", &["--nproc-per-node=2"], &[]);
    let adapter = |output: &std::path::Path| std::fs::read(output.join("adapter/adapter_model.safetensors"));
    assert!(adapter(&output).unwrap() == adapter(&undisturbed).unwrap(), "it learned something else");
    let audit = audit(&output);
    assert_eq!((&audit["missing"], &audit["duplicate"]), (&0.into(), &0.into()), "{audit:#}");
    assert_eq!(lines.iter().filter(|line| line.contains("is slow: ")).count(), 1, "{printed}");
}
