//! A trained policy, exported, served, and asked: by hand, by openpi's own client, and by the loader in
//! PyTorch.

use std::{
    io::{Read, Write},
    net::TcpStream,
    path::Path,
    process::Command,
    sync::OnceLock,
};

use nix::sys::signal::Signal;
use safetensors::SafeTensors;

use super::support::{CoxProcess, cox, processes::signal, read_json, root, train};

/// A certificate for localhost, and its key.
pub const CERTIFICATES: &str = "worker/serve/src/tests/tls";

/// A short run and its checkpoints, made once.
fn trained() -> &'static Path {
    static RUN: OnceLock<tempfile::TempDir> = OnceLock::new();
    let dir = RUN.get_or_init(|| {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let short = [
            "train.steps=6",
            "train.checkpoint_every=3",
            "eval.samples=0",
            "optimizer.warmup_steps=2",
            "optimizer.lr.lora=0.02",
        ];
        train(&dir.path().join("run"), &short);
        dir
    });
    Box::leak(dir.path().join("run").into_boxed_path())
}

fn done(arguments: &[&str]) -> String {
    let (status, printed) = CoxProcess::start(arguments).finish();
    assert!(status.success(), "{printed}");
    printed
}

/// A server, and where it listens.
pub fn serve(dir: &Path) -> (CoxProcess, String) {
    serve_with(dir, &[])
}

fn serve_with(dir: &Path, flags: &[&str]) -> (CoxProcess, String) {
    let arguments = ["serve", dir.to_str().expect("a readable path"), "--listen=127.0.0.1:0", "--device=cpu"];
    let mut command = cox(&[&arguments, flags].concat());
    command.env_remove("COX_TOKEN");
    let mut running = CoxProcess::of(command);
    let line = running.wait_for("serving at ws");
    let address = line.split("://").nth(1).and_then(|rest| rest.split(' ').next());
    (running, address.expect("an address").to_owned())
}

fn get(address: &str, path: &str) -> String {
    let mut stream = TcpStream::connect(address).expect("it listens");
    write!(stream, "GET {path} HTTP/1.1\r\nHost: a\r\n\r\n").expect("it reads");
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("it answers");
    text
}

/// Runs a script of `integration-tests/peer` with a Python that has these modules, or says that there is
/// none: `COX_TEST_PYTHON`, else `python3`.
pub fn python(modules: &str, script: &str, arguments: &[&str]) {
    let interpreter = std::env::var("COX_TEST_PYTHON").unwrap_or_else(|_| "python3".into());
    let has = Command::new(&interpreter).args(["-c", &format!("import {modules}")]).output();
    if !has.is_ok_and(|output| output.status.success()) {
        let _ = writeln!(std::io::stderr(), "skipped: {script}: {interpreter} has no {modules}");
        return;
    }
    let mut command = Command::new(&interpreter);
    command.env("SSL_CERT_FILE", root().join(CERTIFICATES).join("cert.pem"));
    command.arg(root().join("integration-tests/peer").join(script)).args(arguments).current_dir(root());
    let output = command.env("PYTHONPATH", root().join("launcher/python")).output().expect("it was asked");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
}

#[test]
fn a_served_policy_is_healthy_counts_and_ends_by_a_signal() {
    let (running, address) = serve(trained());
    assert!(get(&address, "/healthz").ends_with("OK\n"));
    assert!(get(&address, "/metrics").contains("cox_serve_latency_seconds_count 0\n"));
    signal(running.pid() as i32, Signal::SIGTERM);
    let (status, printed) = running.finish();
    assert!(status.success(), "{printed}");
    // A line says how severe it is, and not in which module it was written.
    assert!(printed.contains("  info    SIGTERM: finishing requests under way"), "{printed}");
    assert!(printed.contains("  info    warm-up: "), "{printed}");
}

#[test]
fn openpis_own_client_is_answered_over_tls() {
    let file = |name: &str| root().join(CERTIFICATES).join(name).display().to_string();
    let (cert, key) = (format!("--tls-cert={}", file("cert.pem")), format!("--tls-key={}", file("key.pem")));
    let (_running, address) = serve_with(trained(), &[&cert, &key]);
    assert!(get(&address, "/healthz").contains("this port speaks TLS"));
    let port = address.split(':').nth(1).expect("a port");
    python("openpi_client, numpy", "serve_client.py", &[&format!("wss://localhost:{port}")]);
}

#[test]
fn a_certificate_without_its_key_is_refused_in_words() {
    let file = |name: &str| root().join(CERTIFICATES).join(name).display().to_string();
    let dir = trained().to_str().expect("a readable path");
    let cert = format!("--tls-cert={}", file("cert.pem"));
    let (status, printed) = CoxProcess::start(&["serve", dir, &cert]).finish();
    assert!(status.code() == Some(2) && printed.contains("--tls-key"), "{printed}");
    let other = format!("--tls-key={}", file("other-key.pem"));
    let (status, printed) = CoxProcess::start(&["serve", dir, &cert, &other]).finish();
    assert!(status.code() == Some(2) && printed.contains("not the key of"), "{printed}");
}

#[test]
fn openpis_own_client_is_answered() {
    let (_running, address) = serve(trained());
    python("openpi_client, numpy", "serve_client.py", &[&address]);
}

#[test]
fn the_loader_in_pytorch_samples_what_the_server_answers() {
    let (_running, address) = serve(trained());
    let dir = trained().to_str().expect("a readable path");
    python("torch, transformers, peft, openpi_client", "check_policy.py", &[dir, &address]);
}

/// Modules that trained in full, without adapters, and observations under names of their own.
#[test]
fn the_loader_reads_whole_modules_and_names_on_the_wire() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let run = dir.path().join("run");
    let whole = "model.train=['visual\\.merger', 'language_model\\.norm']";
    let short = [
        "train.steps=6",
        "eval.samples=0",
        "optimizer.warmup_steps=2",
        "optimizer.lr.base=0.01",
        "lora=",
        whole,
        "serve.cameras=[observation/image]",
        "serve.state=[observation/joint_position, observation/gripper_position]",
        "serve.prompt=instruction",
    ];
    train(&run, &short);
    assert!(run.join("base.safetensors").exists());
    let (_running, address) = serve(&run);
    let dir = run.to_str().expect("a readable path");
    python("torch, transformers, peft, openpi_client", "check_policy.py", &[dir, &address]);
}

#[test]
fn lerobots_own_functions_find_the_policy() {
    let dir = trained().to_str().expect("a readable path");
    python("lerobot.policies, transformers, peft", "check_lerobot.py", &[dir]);
}

#[test]
fn any_checkpoint_is_exported_as_a_run_leaves_its_last() {
    let run = trained();
    let dir = run.to_str().expect("a readable path");
    let same = |a: &Path, b: &Path| {
        ["adapter/adapter_model.safetensors", "expert.safetensors", "policy.json", "stats.json"].iter().all(
            |file| {
                std::fs::read(a.join(file)).expect("written") == std::fs::read(b.join(file)).expect("written")
            },
        )
    };
    done(&["export", dir]);
    assert!(same(run, &run.join("export/step-00000006")));
    let other = tempfile::tempdir().expect("a temporary directory");
    let out = other.path().join("three");
    done(&["export", dir, "--step=3", "--out", out.to_str().expect("a readable path")]);
    assert!(!same(run, &out));
    assert_eq!(read_json(&out.join("manifest.json"))["steps"], 3);
    // What was exported is served like a run.
    let (_running, address) = serve(&out);
    assert!(get(&address, "/healthz").ends_with("OK\n"));

    // An untrained policy: the one that training began with.
    let untrained = other.path().join("untrained");
    done(&["export", dir, "--step=0", "--out", untrained.to_str().expect("a readable path")]);
    assert_eq!(read_json(&untrained.join("manifest.json"))["steps"], 0);
    let bytes = std::fs::read(untrained.join("expert.safetensors")).expect("written");
    let tensors = SafeTensors::deserialize(&bytes).expect("a safetensors file");
    let last = tensors.tensor("expert.final.out.weight").expect("an expert has it");
    assert!(last.data().iter().all(|byte| *byte == 0), "a new expert moves nothing");

    let told = serde_json::json!({
        "step": 3, "measure": "mae", "value": 0.5, "samples": 8, "seed": 0,
        "checkpoint": "checkpoints/step-00000003", "artifacts": "best",
    });
    std::fs::write(run.join("best.json"), told.to_string()).expect("writable");
    let best = other.path().join("best");
    done(&["export", dir, "--step=best", "--out", best.to_str().expect("a readable path")]);
    assert!(same(&best, &out));
    let (status, printed) = CoxProcess::start(&["export", dir, "--step=4"]).finish();
    assert!(!status.success() && printed.contains("steps with a checkpoint: [3, 6]"), "{printed}");
}

#[test]
fn a_merged_checkpoint_has_the_logits_of_the_adapted_model() {
    let dir = trained().to_str().expect("a readable path");
    let kept = tempfile::tempdir().expect("a temporary directory");
    let path = |name: &str| kept.path().join(name).to_str().expect("a readable path").to_owned();
    done(&["export", dir, "--merged", "--out", &path("out")]);
    done(&["data", "sample", "configs/quickstart.yaml", "--index=5", "--out", &path("inputs")]);
    let logits = |name: &str, model: &str, adapter: &[&str]| {
        let out = path(name);
        let mut arguments = vec!["model", "forward", "--model", model, "--inputs"];
        let inputs = path("inputs");
        arguments.extend([inputs.as_str(), "--out", &out]);
        arguments.extend(adapter);
        done(&arguments);
        let bytes = std::fs::read(&out).expect("written");
        let tensors = SafeTensors::deserialize(&bytes).expect("a safetensors file");
        let data = tensors.tensor("logits").expect("logits are written").data().to_vec();
        data.as_chunks().0.iter().map(|value| f64::from(f32::from_le_bytes(*value))).collect::<Vec<_>>()
    };
    let (base, adapter) = ("configs/assets/tiny-vla", path("out/adapter"));
    let adapted = logits("adapted", base, &["--adapter", &adapter]);
    let away = |other: &[f64]| {
        let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
        norm(&mut other.iter().zip(&adapted).map(|(a, b)| a - b)) / norm(&mut adapted.iter().copied())
    };
    let merged = away(&logits("merged", &path("out/merged"), &[]));
    let plain = away(&logits("plain", base, &[]));
    // The checkpoint is in bfloat16, to which merged weights are rounded.
    assert!(merged < 1e-2 && merged < plain, "{merged:e}; without the adapter {plain:e}");
    python("torch, transformers, peft", "check_merged.py", &[base, &adapter, &path("out/merged")]);
}

#[test]
fn a_directory_without_a_policy_is_refused_in_words() {
    let empty = tempfile::tempdir().expect("a temporary directory");
    let dir = empty.path().to_str().expect("a readable path");
    let (status, printed) = CoxProcess::start(&["serve", dir]).finish();
    assert_eq!(status.code(), Some(2), "{printed}");
    assert!(printed.contains("not the output directory of a run"), "{printed}");
}
