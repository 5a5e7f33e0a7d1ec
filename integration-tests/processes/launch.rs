//! Launchers as people and schedulers use them: two machines, signals, `kill -9`, ports in use, questions about a run.

use std::{net::TcpListener, path::Path};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::support::{Running, cox, read_json};

/// Few and small steps, nothing evaluated.
const SHORT: [&str; 3] = ["eval.samples=0", "train.global_batch=4", "train.checkpoint_every=0"];

fn run_arguments<'a>(output_dir: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    let mut arguments = vec!["run", "configs/quickstart.yaml", output_dir];
    arguments.extend(SHORT);
    arguments.extend(more);
    arguments
}

fn output_dir(output: &Path) -> String {
    format!("run.output_dir={}", output.display())
}

fn children(parent: u32) -> Vec<i32> {
    let tasks = std::fs::read_dir(format!("/proc/{parent}/task")).expect("Linux").flatten();
    let lists = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("children")).ok());
    let pids: Vec<String> = lists.collect();
    pids.iter().flat_map(|list| list.split_whitespace()).filter_map(|pid| pid.parse().ok()).collect()
}

#[test]
fn two_launchers_with_addresses_of_their_own_train_one_run() {
    let dir = tempfile::tempdir().unwrap();
    let output = dir.path().join("run");
    let (output_dir, endpoint) = (output_dir(&output), free_endpoint());
    let node = |rank: &'static str, address: &'static str| {
        let flags = [
            "train.steps=3",
            "--nnodes=2",
            "--nproc_per_node=1",
            "--node-rank",
            rank,
            "--local-addr",
            address,
            "--rdzv-endpoint",
            &endpoint,
        ];
        Running::start(&run_arguments(&output_dir, &flags))
    };
    // The second one comes first: it waits for the coordinator.
    let second = node("1", "127.0.0.2");
    let first = node("0", "127.0.0.1");
    let ((status, printed), (second_status, second_printed)) = (first.finish(), second.finish());
    assert_eq!(status.code(), Some(0), "{printed}");
    assert_eq!(second_status.code(), Some(0), "{second_printed}");
    assert!(
        printed.contains("rank 0 of 2") && second_printed.contains("rank 1 of 2"),
        "{printed}\n{second_printed}"
    );
    let summary = read_json(&output.join("summary.json"));
    assert_eq!(summary["world_size"], 2);
    assert!(output.join("adapter/adapter_model.safetensors").exists());
}

/// An address that was free a moment ago.
fn free_endpoint() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    listener.local_addr().expect("it is bound").to_string()
}

#[test]
fn ctrl_c_leaves_a_checkpoint_that_the_next_launch_goes_on_from() {
    let dir = tempfile::tempdir().unwrap();
    let output = dir.path().join("run");
    let output_dir = output_dir(&output);
    let mut running = Running::start(&run_arguments(&output_dir, &["train.steps=100000"]));
    running.wait_for("2/100000");
    kill(Pid::from_raw(running.pid() as i32), Signal::SIGINT).unwrap();
    let (status, printed) = running.finish();
    assert_eq!(status.code(), Some(130), "{printed}");
    let stopped_at = read_json(&output.join("summary.json"))["steps"].as_u64().unwrap();
    let steps = format!("train.steps={}", stopped_at + 1);
    let (status, printed) = Running::start(&run_arguments(&output_dir, &[&steps])).finish();
    assert_eq!(status.code(), Some(0), "{printed}");
    assert_eq!(read_json(&output.join("summary.json"))["first_step"], stopped_at);
}

#[test]
fn kill_9_of_the_launcher_ends_coordinator_and_workers() {
    let dir = tempfile::tempdir().unwrap();
    let output_dir = output_dir(&dir.path().join("run"));
    let mut running = Running::start(&run_arguments(&output_dir, &["train.steps=100000", "-t", "3"]));
    running.wait_for("1/100000");
    let started = children(running.pid());
    assert_eq!(started.len(), 3, "a coordinator and two workers");
    kill(Pid::from_raw(running.pid() as i32), Signal::SIGKILL).unwrap();
    running.finish();
    for pid in started {
        // Nobody reaps an orphan's orphan at once everywhere: a process that is dead but unreaped counts as ended.
        while let Ok(stat) = std::fs::read_to_string(format!("/proc/{pid}/stat"))
            && !stat.contains(") Z ")
        {
            std::thread::yield_now();
        }
    }
}

#[test]
fn a_lost_coordinator_ends_the_run_with_its_own_exit_code() {
    let dir = tempfile::tempdir().unwrap();
    let output_dir = output_dir(&dir.path().join("run"));
    let mut running = Running::start(&run_arguments(&output_dir, &["train.steps=100000"]));
    running.wait_for("1/100000");
    let is_coordinator = |pid: &i32| {
        let command = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        command.split(|byte| *byte == 0).any(|argument| argument == b"coordinator")
    };
    let coordinator = children(running.pid()).into_iter().find(is_coordinator).expect("it runs here");
    kill(Pid::from_raw(coordinator), Signal::SIGKILL).unwrap();
    let (status, printed) = running.finish();
    assert_eq!(status.code(), Some(8), "{printed}");
    assert!(printed.contains("the coordinator was lost"), "{printed}");
}

#[test]
fn a_port_in_use_is_named_before_anything_starts() {
    let dir = tempfile::tempdir().unwrap();
    let output_dir = output_dir(&dir.path().join("run"));
    let held = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = held.local_addr().unwrap().to_string();
    let (status, printed) =
        Running::start(&run_arguments(&output_dir, &["--rdzv-endpoint", &endpoint])).finish();
    assert_eq!(status.code(), Some(6), "{printed}");
    assert!(printed.contains(&format!("{endpoint}: the port is in use")), "{printed}");
}

#[test]
fn a_running_run_answers_pauses_and_stops() {
    let dir = tempfile::tempdir().unwrap();
    let output = dir.path().join("run");
    let output_dir = output_dir(&output);
    let mut running = Running::start(&run_arguments(&output_dir, &["train.steps=100000"]));
    running.wait_for("1/100000");
    let ask = |arguments: &[&str]| {
        let mut command = cox(arguments);
        let answer = command.arg("--run").arg(&output).output().unwrap();
        assert!(answer.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&answer.stderr));
        String::from_utf8(answer.stdout).unwrap()
    };
    let status: serde_json::Value = serde_json::from_str(&ask(&["status", "--json"])).unwrap();
    assert_eq!(status["world_size"], 2);
    assert_eq!(status["ranks"].as_array().map(Vec::len), Some(2));
    ask(&["pause"]);
    running.wait_for("paused");
    ask(&["resume"]);
    ask(&["checkpoint"]);
    running.wait_for("checkpoint at step");
    let again = cox(&run_arguments(&output_dir, &[])).output().unwrap();
    assert_eq!(again.status.code(), Some(2), "one directory, one launcher");
    ask(&["stop"]);
    let (status, printed) = running.finish();
    assert_eq!(status.code(), Some(0), "{printed}");
    assert!(output.join("adapter/adapter_model.safetensors").exists());
}
