//! What the machine and other people's files may do to `cox`: few file descriptors, names that a terminal
//! acts on.

use std::{net::TcpStream, process::Command};

use crate::support::{CoxProcess, cox, free_endpoint, root};

#[test]
fn a_coordinator_uses_all_file_descriptors_and_goes_on_without() {
    let dir = tempfile::tempdir().unwrap();
    let (endpoint, output) = (free_endpoint(), format!("run.output_dir={}", dir.path().display()));
    let mut command = Command::new("bash");
    command.args(["-c", "ulimit -Sn 48 && ulimit -Hn 96 && exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_cox")]);
    command.args(["coordinator", "configs/quickstart.yaml", "--listen", &endpoint, &output]);
    command.current_dir(root());
    let mut running = CoxProcess::of(command);
    running.wait_for("waiting for");
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", running.pid())).expect("it lives");
    let files = limits.lines().find(|line| line.starts_with("Max open files")).expect("a limit");
    assert_eq!(files.split_whitespace().nth(3), Some("96"), "{files}");
    let callers: Vec<_> = (0..120).map(|_| TcpStream::connect(&endpoint).expect("it listens")).collect();
    running.wait_for("too many connections");
    drop(callers);
    let token = dir.path().join("logs/token");
    let status = cox(&["status", "--endpoint", &endpoint]).env("COX_TOKEN_FILE", token).output();
    let status = status.expect("cox was built");
    assert!(status.status.success(), "{}", String::from_utf8_lossy(&status.stderr));
    running.assert_alive();
}

#[test]
fn what_a_terminal_would_act_on_is_shown_as_an_escape() {
    let answer = cox(&["check", "none\u{1b}[2J.yaml"]).output().expect("cox was built");
    let message = String::from_utf8_lossy(&answer.stderr);
    assert!(message.contains("none\\u001b[2J.yaml: cannot read") && !message.contains('\u{1b}'), "{message}");
}
