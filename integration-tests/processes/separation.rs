//! Separation as a user runs it: `configs/separation.yaml`, undisturbed and with workers killed.

use std::{path::Path, process::Command};

use crate::support::{Running, cox, killed, read_json, root};

const WEIGHTS: &str = "separator.safetensors";

fn command(output: &Path, overrides: &[&str]) -> Command {
    let output_dir = format!("run.output_dir={}", output.display());
    let mut arguments = vec!["run", "configs/separation.yaml", &output_dir];
    arguments.extend(overrides);
    cox(&arguments)
}

#[test]
fn stems_of_held_out_tracks_are_separated_by_decibels() {
    let dir = tempfile::tempdir().expect("a directory");
    let output = dir.path().join("run");
    let overrides = ["train.steps=60", "train.checkpoint_every=0"];
    let (status, printed) = Running::of(command(&output, &overrides)).finish();
    assert!(status.success(), "{printed}");
    let summary = read_json(&output.join("summary.json"));
    let number = |pointer: &str| summary.pointer(pointer).and_then(|v| v.as_f64()).expect(pointer);
    assert!(number("/loss_last") < 0.6 * number("/loss_first"), "{summary:#}");
    for measure in ["sdr", "csdr"] {
        let [before, after] = ["before", "after"].map(|when| number(&format!("/error_{when}/{measure}")));
        assert!(after > 4.0 && after > before + 4.0, "{measure}: {before} dB -> {after} dB");
    }
    let manifest = read_json(&output.join("manifest.json"));
    let files = manifest["files"].as_array().expect("an array");
    assert!(files.iter().any(|file| file["path"] == WEIGHTS), "{manifest:#}");
    assert_eq!(read_json(&output.join("separator.json"))["stems"][1], "drums");
    // What was predicted at the start, beside what the workers measured.
    let peak = &summary["memory"];
    assert!(printed.contains("held-out sdr"), "{printed}\n{peak:#}");
}

#[test]
fn workers_killed_three_times_leave_the_undisturbed_separator() {
    killed::three_times(command, WEIGHTS);
}

#[test]
fn tracks_that_cannot_be_used_are_refused_before_the_first_step_or_left_out() {
    let dir = tempfile::tempdir().expect("a directory");
    let tracks = dir.path().join("tracks");
    let ship = root().join("configs/assets/plucks");
    for track in ["track-00", "track-01"] {
        std::fs::create_dir_all(tracks.join(track)).expect("a folder");
        for stem in ["plucks.wav", "drums.wav"] {
            std::fs::copy(ship.join(track).join(stem), tracks.join(track).join(stem)).expect("it ships");
        }
    }
    let data = format!("data.path={}", tracks.display());
    let overrides = |rate| vec![data.as_str(), "data.holdout_every=0", rate];
    let (status, printed) =
        Running::of(command(&dir.path().join("rate"), &overrides("data.sample_rate=8000"))).finish();
    assert_eq!(status.code(), Some(3), "{printed}");
    assert!(printed.contains("track-00/plucks.wav: sample rate: is 4000 Hz"), "{printed}");
    assert!(!printed.contains("step      1/"), "{printed}");

    // A copy that was cut short shows when its last segment is read.
    let path = tracks.join("track-01/drums.wav");
    let bytes = std::fs::read(&path).expect("a file");
    std::fs::write(&path, &bytes[..bytes.len() - 2000]).expect("a file");
    let mut overrides = overrides("data.sample_rate=4000");
    overrides.extend(["train.epochs=1", "train.steps=", "eval.samples=0", "train.checkpoint_every=0"]);
    overrides.extend(["train.global_batch=2", "train.micro_batch=1", "optimizer.warmup_steps=0"]);
    let (status, printed) = Running::of(command(&dir.path().join("cut"), &overrides)).finish();
    assert!(status.success(), "{printed}");
    assert!(printed.contains("track-01/drums.wav") && printed.contains("ends early"), "{printed}");
}
