//! Separation as a user runs it: `configs/separation.yaml`, undisturbed and with workers killed.

use std::{path::Path, process::Command};

use crate::support::{CoxProcess, cox, killed, read_json, root};

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
    let (status, printed) = CoxProcess::of(command(&output, &overrides)).finish();
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
    assert_stems_of_a_held_out_track(&output, dir.path());
    // What was predicted at the start, beside what the workers measured.
    let peak = &summary["memory"];
    assert!(printed.contains("held-out sdr"), "{printed}\n{peak:#}");
}

/// Mixes a track that was held out, longer than a segment, and has it taken apart.
fn assert_stems_of_a_held_out_track(run: &Path, dir: &Path) {
    let track = root().join("configs/assets/plucks/track-03");
    let [plucks, drums] = ["plucks", "drums"].map(|stem| samples(&track.join(format!("{stem}.wav"))));
    let mixture = dir.join("mixture.wav");
    let spec = hound::WavReader::open(track.join("drums.wav")).expect("it ships").spec();
    let spec = hound::WavSpec { bits_per_sample: 32, sample_format: hound::SampleFormat::Float, ..spec };
    let mut writer = hound::WavWriter::create(&mixture, spec).expect("a file");
    plucks.iter().zip(&drums).for_each(|(a, b)| writer.write_sample(a + b).expect("a sample"));
    writer.finalize().expect("a file");
    let path = |path: &Path| path.display().to_string();
    let arguments = ["generate", &path(run), "--audio", &path(&mixture), "--out", &path(&dir.join("stems"))];
    let out = cox(&arguments).output().expect("cox was built");
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let told = String::from_utf8(out.stdout).expect("text");
    for ((stem, wanted), told) in [("plucks", plucks), ("drums", drums)].into_iter().zip(told.lines()) {
        let file = dir.join(format!("stems/mixture/{stem}.wav"));
        assert_eq!(told, path(&file));
        let found = samples(&file);
        assert_eq!(found.len(), wanted.len());
        let square = |x: f32| f64::from(x) * f64::from(x);
        let error: f64 = found.iter().zip(&wanted).map(|(a, b)| square(a - b)).sum();
        let ratio = 10.0 * (wanted.iter().map(|x| square(*x)).sum::<f64>() / error).log10();
        assert!(ratio > 3.0, "{stem}: {ratio} dB");
    }
}

/// Values of a file, full scale at 1.
fn samples(path: &Path) -> Vec<f32> {
    let mut reader =
        hound::WavReader::open(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    match reader.spec().sample_format {
        hound::SampleFormat::Float => reader.samples().map(|sample| sample.expect("a sample")).collect(),
        hound::SampleFormat::Int => {
            let scale = 2f32.powi(1 - i32::from(reader.spec().bits_per_sample));
            reader.samples::<i32>().map(|sample| sample.expect("a sample") as f32 * scale).collect()
        }
    }
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
        CoxProcess::of(command(&dir.path().join("rate"), &overrides("data.sample_rate=8000"))).finish();
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
    // One track of a few is more than a run leaves out by default.
    overrides.push("train.max_left_out=0.5");
    let (status, printed) = CoxProcess::of(command(&dir.path().join("cut"), &overrides)).finish();
    assert!(status.success(), "{printed}");
    assert!(printed.contains("track-01/drums.wav") && printed.contains("ends early"), "{printed}");
}
