//! Launchers as people and schedulers use them: two machines, signals, `kill -9`, ports in use, questions
//! about a run.

use std::{
    io::{BufRead, BufReader, Write},
    net::TcpListener,
    path::Path,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::support::{
    CoxProcess, cox, free_endpoint,
    processes::{children, interrupt, wait_for, wait_for_coordinator, wait_until_gone},
    read_json, root,
    tiny::{HoldFile, Tiny},
};

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

/// Runs its arguments on a terminal that has no size, as `docker run -t` gives one without its own.
const ON_A_TERMINAL: &str = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:], lambda fd: os.read(fd, 1024))))";

#[test]
fn on_a_terminal_without_a_size_a_run_is_told_in_lines() {
    if !Command::new("python3").args(["-c", "import os, pty"]).status().is_ok_and(|ended| ended.success()) {
        return println!("skipped: there is no Python 3 to make a terminal with");
    }
    let tiny = Tiny::new(3, 0);
    let of = tiny.command(&[]);
    let mut terminal = Command::new("python3");
    terminal.args(["-c", ON_A_TERMINAL]).arg(of.get_program()).args(of.get_args());
    terminal.current_dir(root()).env("TERM", "xterm").stdin(Stdio::null());
    let ended = terminal.output().expect("Python is here");
    let printed = String::from_utf8_lossy(&ended.stdout);
    assert!(ended.status.success(), "{printed}");
    assert!(printed.contains("3 of 3 steps") && !printed.contains("\u{1b}[2K"), "{printed}");
    assert!(printed.lines().any(|line| line.contains("step")), "{printed}");
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
        CoxProcess::start(&run_arguments(&output_dir, &flags))
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

#[test]
fn ctrl_c_leaves_a_checkpoint_that_the_next_launch_goes_on_from() {
    let dir = tempfile::tempdir().unwrap();
    let output = dir.path().join("run");
    let output_dir = output_dir(&output);
    let mut running = CoxProcess::start(&run_arguments(&output_dir, &["train.steps=100000"]));
    running.wait_for("2/100000");
    let interrupt = interrupt();
    kill(Pid::from_raw(running.pid() as i32), interrupt).unwrap();
    let (status, printed) = running.finish();
    assert_eq!(status.code(), Some(128 + interrupt as i32), "{printed}");
    let stopped_at = read_json(&output.join("summary.json"))["steps"].as_u64().unwrap();
    let steps = format!("train.steps={}", stopped_at + 1);
    let (status, printed) = CoxProcess::start(&run_arguments(&output_dir, &[&steps])).finish();
    assert_eq!(status.code(), Some(0), "{printed}");
    assert_eq!(read_json(&output.join("summary.json"))["first_step"], stopped_at);
}

#[test]
fn kill_9_of_the_launcher_leaves_nothing_and_the_next_launch_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let output = dir.path().join("run");
    let (output_dir, endpoint) = (output_dir(&output), free_endpoint());
    let launch = |steps: &str| {
        let flags = [steps, "train.checkpoint_every=1", "-t", "3", "--rdzv-endpoint", &endpoint];
        CoxProcess::start(&run_arguments(&output_dir, &flags))
    };
    let mut running = launch("train.steps=100000");
    running.wait_for("2/100000");
    let started = children(running.pid());
    assert_eq!(started.len(), 3, "a coordinator and two workers");
    kill(Pid::from_raw(running.pid() as i32), Signal::SIGKILL).unwrap();
    let killed = Instant::now();
    running.finish();
    wait_until_gone(&started);
    assert!(killed.elapsed() < Duration::from_secs(2), "gone after {:?}", killed.elapsed());
    drop(TcpListener::bind(&endpoint).expect("the port is free again"));
    // One step more than the killed launch can have done, and the same endpoint and directory.
    let newest = newest_checkpoint(&output);
    let (status, printed) = launch(&format!("train.steps={}", newest + 2)).finish();
    assert_eq!(status.code(), Some(0), "{printed}");
    assert_eq!(read_json(&output.join("summary.json"))["first_step"], newest);
}

fn newest_checkpoint(output: &Path) -> u64 {
    let complete = |step: &String| output.join("checkpoints").join(step).join("manifest.json").exists();
    let entries = std::fs::read_dir(output.join("checkpoints")).expect("checkpoints were written").flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).filter(complete);
    names.filter_map(|name| name.strip_prefix("step-")?.parse().ok()).max().expect("one is complete")
}

#[test]
fn a_coordinator_that_dies_again_and_again_is_given_up_with_its_own_exit_code() {
    let dir = tempfile::tempdir().unwrap();
    let output_dir = output_dir(&dir.path().join("run"));
    let mut running = CoxProcess::start(&run_arguments(&output_dir, &["train.steps=100000"]));
    running.wait_for("1/100000");
    let mut last = 0;
    for _ in 0..6 {
        last = wait_for_coordinator(running.pid(), last);
        kill(Pid::from_raw(last), Signal::SIGKILL).unwrap();
    }
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
        CoxProcess::start(&run_arguments(&output_dir, &["--rdzv-endpoint", &endpoint])).finish();
    assert_eq!(status.code(), Some(6), "{printed}");
    assert!(printed.contains(&format!("{endpoint}: the port is in use")), "{printed}");
}

#[test]
fn a_running_run_answers_pauses_and_stops() {
    let dir = tempfile::tempdir().unwrap();
    let output = dir.path().join("run");
    let output_dir = output_dir(&output);
    let logs = dir.path().join("logs").display().to_string();
    let flags = ["train.steps=100000", "--log-dir", &logs];
    let mut running = CoxProcess::start(&run_arguments(&output_dir, &flags));
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
    assert_eq!(ask(&["pause"]), "training; pauses at the next step boundary\n");
    running.wait_for("paused");
    assert_eq!(ask(&["pause"]), "paused\n");
    ask(&["resume"]);
    ask(&["checkpoint"]);
    running.wait_for("checkpoint at step");
    let again = cox(&run_arguments(&output_dir, &[])).output().unwrap();
    assert_eq!(again.status.code(), Some(2), "one directory, one launcher, wherever it logs");
    refuses_to_stop_another(dir.path(), &output);
    let mut watch =
        cox(&["watch", "--run"]).arg(&output).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut lines = BufReader::new(watch.stdout.take().unwrap()).lines();
    let first = lines.next().expect("it says where the run is").unwrap();
    ask(&["stop"]);
    let (status, printed) = running.finish();
    assert_eq!(status.code(), Some(0), "{printed}");
    let seen: Vec<_> = std::iter::once(first).chain(lines.map_while(Result::ok)).collect();
    assert!(watch.wait().unwrap().success(), "{seen:#?}");
    assert!(seen.last().is_some_and(|line| line.contains("finished")), "{seen:#?}");
    let dated =
        |line: &String| line.as_bytes().get(2) == Some(&b':') && line.as_bytes().get(5) == Some(&b':');
    assert!(seen.len() > 1 && seen.iter().all(dated), "{seen:#?}");
    assert!(output.join("adapter/adapter_model.safetensors").exists());
}

/// A run whose launcher was killed has left its address, at which the run in `living` listens by now.
fn refuses_to_stop_another(dir: &Path, living: &Path) {
    let killed = dir.join("killed");
    std::fs::create_dir_all(killed.join("logs")).expect("a directory");
    std::fs::copy(living.join("logs/endpoint"), killed.join("logs/endpoint")).expect("a file");
    let run_file = r#"{"run_id": "killed", "name": "quickstart", "spec_digest": "", "version": ""}"#;
    std::fs::write(killed.join("run.json"), run_file).expect("a file");
    // Each had its own token; or both have one that their user has set.
    let tokens = [
        (killed.join("logs/token"), "now belongs to another run"),
        (living.join("logs/token"), "now belongs to run"),
    ];
    for (token, expected) in tokens {
        let mut stop = cox(&["stop", "--run"]);
        if token.exists() {
            stop.env("COX_TOKEN_FILE", token);
        }
        let refused = stop.arg(&killed).output().expect("cox was built");
        let message = String::from_utf8_lossy(&refused.stderr);
        assert_eq!(refused.status.code(), Some(8), "{message}");
        assert!(
            message.contains("no launcher is running this run") && message.contains(expected),
            "{message}"
        );
    }
}

#[test]
fn a_launch_with_bad_input_ends_with_its_coordinator() {
    let dir = tempfile::tempdir().unwrap();
    let output = dir.path().join("run");
    let output_dir = output_dir(&output);
    // A model that is gone when the workers load it: before that a launch is refused.
    let model = dir.path().join("model");
    std::fs::create_dir(&model).expect("a directory");
    for file in std::fs::read_dir(root().join("configs/assets/tiny-vla")).expect("a model").flatten() {
        std::fs::copy(file.path(), model.join(file.file_name())).expect("a file");
    }
    let held = [0, 1].map(|rank| HoldFile::order(&dir.path().join("hold"), rank, "loading", 0));
    let model_path = format!("model.path={}", model.display());
    let mut command = cox(&run_arguments(&output_dir, &[&model_path]));
    command.env("COX_TEST_HOLD", dir.path().join("hold"));
    let mut running = CoxProcess::of(command);
    held.iter().for_each(|held| held.wait(&mut running));
    std::fs::remove_dir_all(&model).expect("it is there");
    held.into_iter().for_each(HoldFile::release);
    let (status, printed) = running.finish();
    assert_eq!(status.code(), Some(3), "{printed}");
    let failure = read_json(&output.join("failure.json"));
    assert_eq!(
        (&failure["exit_code"], &failure["first_cause"]["fatal"]),
        (&3.into(), &true.into()),
        "{failure:#}"
    );
    // The other worker has the same to say, and nobody to say it to: it would look for three seconds.
    for rank in ["rank0000", "rank0001"] {
        let log =
            std::fs::read_to_string(output.join("logs").join(rank).join("stderr.log")).unwrap_or_default();
        assert!(!log.contains("could not report the failure to the coordinator"), "{log}");
    }
}

#[test]
fn a_console_that_nobody_reads_stops_nothing() {
    let tiny = Tiny::new(6, 2);
    let (reader, writer) = std::io::pipe().expect("a pipe");
    let mut full = writer.try_clone().expect("its other end");
    // For as long as the test lasts: what is written there waits.
    std::thread::spawn(move || while full.write_all(&[b'.'; 4096]).is_ok() {});
    let mut command = tiny.command(&[]);
    command.stdout(Stdio::null()).stderr(writer);
    let mut launcher = command.spawn().expect("cox was built");
    drop(command);
    let status = wait_for("the end of the run", || launcher.try_wait().expect("a child can be asked"));
    assert_eq!(status.code(), Some(0));
    let log = std::fs::read_to_string(tiny.output().join("logs/coordinator.log")).expect("a log");
    assert!(log.contains("6/6"), "the log has what the console has not:\n{log}");
    assert!(tiny.output().join("adapter/adapter_model.safetensors").exists());
    drop(reader);
}

#[test]
fn a_log_on_a_full_disk_stops_nothing() {
    let full = || std::fs::OpenOptions::new().write(true).open("/dev/full").expect("Linux has one");
    let dir = tempfile::tempdir().unwrap();
    let output_dir = output_dir(&dir.path().join("run"));
    let config = ["worker", "--config", "configs/quickstart.yaml", &output_dir, "train.steps=2"];
    let trained = cox(&config).args(SHORT).stderr(full()).output().unwrap();
    assert_eq!(trained.status.code(), Some(0));
    let refused = cox(&["status", "--endpoint", "127.0.0.1:1"]).stderr(full()).output().unwrap();
    assert_eq!(refused.status.code(), Some(8), "the last word cannot be said");
}
