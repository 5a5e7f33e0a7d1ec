//! Streaming training as a user runs it: both phases by two commands, with workers killed, and with kept
//! features.

use std::path::{Path, PathBuf};

use nix::sys::signal::Signal;
use serde_json::Value;

use crate::support::{
    CoxProcess, cox, killed,
    processes::{signal, worker_of},
    read_json, root,
    tiny::{HoldFile, audit},
};

const FIRST: &str = "configs/trajectory.yaml";
const SECOND: &str = "configs/trajectory-adapt.yaml";
const SHORT: [&str; 4] =
    ["train.steps=8", "train.checkpoint_every=3", "eval.samples=2", "optimizer.warmup_steps=2"];

fn arguments(config: &str, output: &Path, overrides: &[&str]) -> Vec<String> {
    let output_dir = format!("run.output_dir={}", output.display());
    let fixed = ["run".to_owned(), config.to_owned(), output_dir];
    fixed.into_iter().chain(overrides.iter().map(ToString::to_string)).collect()
}

fn start(config: &str, output: &Path, overrides: &[&str]) -> CoxProcess {
    let arguments = arguments(config, output, overrides);
    CoxProcess::of(cox(&arguments.iter().map(String::as_str).collect::<Vec<_>>()))
}

/// A run that ends well; its summary and what it printed.
fn done(config: &str, output: &Path, overrides: &[&str]) -> (Value, String) {
    let (status, printed) = start(config, output, overrides).finish();
    assert!(status.success(), "{printed}");
    (read_json(&output.join("summary.json")), printed)
}

fn bytes(output: &Path, file: &str) -> Vec<u8> {
    std::fs::read(output.join(file)).unwrap_or_else(|error| panic!("{file}: {error}"))
}

fn number(summary: &Value, pointer: &str) -> f64 {
    summary.pointer(pointer).and_then(Value::as_f64).unwrap_or_else(|| panic!("{pointer}: {summary:#}"))
}

#[test]
fn the_second_command_adapts_what_the_first_has_trained() {
    let dir = tempfile::tempdir().expect("a directory");
    let (one, two) = (dir.path().join("one"), dir.path().join("two"));
    let (first, printed) = done(FIRST, &one, &["train.checkpoint_every=0"]);
    assert!(number(&first, "/loss_last") < 0.1 * number(&first, "/loss_first"), "{first:#}");
    let [before, after] = ["before", "after"].map(|when| number(&first, &format!("/error_{when}/mse")));
    assert!(after < 0.1 * before, "held-out error {before} -> {after}");
    assert!(printed.contains("held-out mse") && printed.contains("extractor"), "{printed}");

    let from = format!("train.init_from={}", one.display());
    let (second, printed) = done(SECOND, &two, &[&from, "train.checkpoint_every=0"]);
    // It begins where the first has ended, on pictures of another kind, and not from drawn weights.
    let [before, after] = ["before", "after"].map(|when| number(&second, &format!("/error_{when}/mse")));
    assert!(before < 0.2 * number(&first, "/error_before/mse"), "{before}\n{printed}");
    assert!(after < 0.8 * before, "held-out error {before} -> {after}\n{printed}");
    let manifest = read_json(&two.join("manifest.json"));
    let files: Vec<_> = manifest["files"].as_array().expect("an array").iter().map(|f| &f["path"]).collect();
    for file in ["network.safetensors", "network.json", "adapter/adapter_model.safetensors"] {
        assert!(files.contains(&&file.into()), "{files:?}");
    }
    assert_ne!(bytes(&one, "network.safetensors"), bytes(&two, "network.safetensors"), "merged");
}

#[test]
fn workers_killed_three_times_leave_the_undisturbed_network_and_adapter() {
    let dir = tempfile::tempdir().expect("a directory");
    let of = |name: &str| dir.path().join(name);
    let (_, _) = done(FIRST, &of("whole"), &SHORT);
    let train_killed = |config: &str, name: &str, overrides: &[&str]| {
        let (output, hold) = (of(name), of(&format!("{name}-hold")));
        let stands = [(1, "forward", 1), (0, "backward", 3), (1, "optimizer", 5)];
        let held = stands.map(|(rank, phase, step)| (rank, HoldFile::order(&hold, rank, phase, step)));
        let arguments = arguments(config, &output, &[&SHORT[..], overrides].concat());
        let mut command = cox(&arguments.iter().map(String::as_str).collect::<Vec<_>>());
        command.env("COX_TEST_HOLD", &hold);
        let mut running = CoxProcess::of(command);
        for (rank, held) in held {
            held.wait(&mut running);
            signal(worker_of(running.pid(), rank).expect("it lives"), Signal::SIGKILL);
            // Its replacement finds nothing left of it.
            held.release();
        }
        let (status, printed) = running.finish();
        assert!(status.success(), "{printed}");
        let found = audit(&output);
        assert_eq!((&found["missing"], &found["duplicate"]), (&0.into(), &0.into()), "{found:#}\n{printed}");
        assert_eq!(found["faults"].as_array().map(Vec::len), Some(3), "{found:#}");
    };
    train_killed(FIRST, "killed", &["network.type=autoencoder"]);
    let assert_same =
        |one: &str, other: &str| killed::assert_same(&of(one), &of(other), "network.safetensors");
    assert_same("whole", "killed");
    let from = format!("train.init_from={}", of("whole").display());
    done(SECOND, &of("adapted"), &[&SHORT[..], &[&from]].concat());
    train_killed(SECOND, "adapted-killed", &[&from]);
    assert_same("adapted", "adapted-killed");
}

#[test]
fn with_kept_features_each_image_is_extracted_once_and_no_bit_changes() {
    let dir = tempfile::tempdir().expect("a directory");
    let of = |name: &str| dir.path().join(name);
    // Three epochs of five steps over 40 training images.
    let epochs = [
        "train.epochs=3",
        "train.steps=null",
        "train.checkpoint_every=0",
        "network.type=vae",
        "eval.samples=2",
    ];
    done(FIRST, &of("live"), &epochs);
    let (kept, printed) = done(FIRST, &of("kept"), &[&epochs[..], &["cache.mode=exact"]].concat());
    assert_eq!((number(&kept, "/cache/misses"), number(&kept, "/cache/hits")), (40.0, 80.0), "{printed}");
    let file = "network.safetensors";
    assert!(bytes(&of("live"), file) == bytes(&of("kept"), file), "another network\n{printed}");
}

#[test]
fn what_people_can_mend_is_refused_before_the_first_step_and_a_damaged_image_is_left_out() {
    let dir = tempfile::tempdir().expect("a directory");
    let pictures = dir.path().join("pictures");
    let shapes = pictures.join("shapes");
    std::fs::create_dir_all(&shapes).expect("a folder");
    for number in 0..12 {
        let name = format!("{number:02}.png");
        std::fs::copy(root().join("configs/assets/pictures/shapes").join(&name), shapes.join(&name))
            .expect("a copy");
    }
    let data = format!("data.path={}", pictures.display());
    let refused = |overrides: &[&str], wanted: &[&str]| {
        let output: PathBuf = dir.path().join(format!("refused-{}", wanted[0].replace(['/', '.', ':'], "-")));
        let (status, printed) = start(FIRST, &output, &[&[&*data][..], overrides].concat()).finish();
        assert_eq!(status.code(), Some(3), "{printed}");
        for text in wanted {
            assert!(printed.contains(text), "no {text:?}:\n{printed}");
        }
        assert!(!printed.contains("step      1/"), "{printed}");
    };
    refused(
        &["data.domains=[shapes, sketches]"],
        &["pictures/sketches", "no such folder", "name some of shapes"],
    );
    refused(&["data.domains=[]"], &["has no image", "that have images: shapes"]);
    refused(&["network.latent_dim=384"], &["network.latent_dim: 384", "give less than 384"]);

    std::fs::write(shapes.join("03.png"), b"\x89PNG\r\n\x1a\n broken").expect("a file");
    // One of ten that are trained on is more than is left out unasked.
    let short = ["train.epochs=2", "train.steps=null", "train.checkpoint_every=0", "eval.samples=0"];
    refused(&short, &["shapes/03.png", "of the last 10 samples, 1 were left out", "train.max_left_out"]);
    let output = dir.path().join("damaged");
    let (_, printed) = done(FIRST, &output, &[&[&*data, "train.max_left_out=0.2"][..], &short].concat());
    assert!(printed.contains("shapes/03.png"), "{printed}");
    let found = audit(&output);
    assert_eq!((&found["missing"], &found["duplicate"]), (&0.into(), &0.into()), "{found:#}\n{printed}");
}
