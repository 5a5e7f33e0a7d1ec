//! Real processes: death with the parent, own process group.

use std::{
    io::{BufRead, BufReader},
    os::unix::process::ExitStatusExt,
    time::{Duration, Instant},
};

use super::*;

/// What is started here would end by itself long after this, and is ended long before.
const ENDED_WITHIN: Duration = Duration::from_secs(60);

fn shell(script: &str) -> Program {
    Program {
        path: "/bin/sh".into(),
        args: vec!["-c".into(), script.into()],
        env: vec![("COX_TEST", "7".into())],
    }
}

fn quiet() -> ChildStreams {
    ChildStreams { stdin: Stdio::null(), stdout: Stdio::piped(), stderr: Stdio::null() }
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

#[test]
fn the_environment_reaches_the_child_and_its_exit_code_us() {
    runtime().block_on(async {
        let mut child = spawn(&shell("exit $COX_TEST"), quiet()).unwrap();
        assert_eq!(child.wait().await.unwrap().code(), Some(7));
    });
}

#[test]
fn what_the_child_started_is_killed_with_it() {
    runtime().block_on(async {
        // The grandchild holds the pipe open: end of file proves that it ended, too.
        let mut child = spawn(&shell("sleep 1000 & echo ready; wait"), quiet()).unwrap();
        let mut out = tokio::io::BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        tokio::io::AsyncBufReadExt::read_line(&mut out, &mut line).await.unwrap();
        let since = Instant::now();
        kill_group(&child);
        assert_eq!(child.wait().await.unwrap().signal(), Some(9));
        assert_eq!(tokio::io::AsyncBufReadExt::read_line(&mut out, &mut line).await.unwrap(), 0);
        assert!(since.elapsed() < ENDED_WITHIN, "ended by itself after {:?}", since.elapsed());
    });
}

#[test]
fn signals_that_a_launcher_answers_pass_its_children_by() {
    runtime().block_on(async {
        let to_itself: String =
            signals::ANSWERED.map(|signal| format!("kill -{} $$; ", signal as i32)).concat();
        let mut child = spawn(&shell(&format!("{to_itself}exit 7")), quiet()).unwrap();
        assert_eq!(child.wait().await.unwrap().code(), Some(7));
    });
}

/// Acts as a launcher when it is run by the test below; a test of nothing otherwise.
#[test]
fn helper_launcher() {
    if std::env::var_os("COX_TEST_HELPER").is_none() {
        return;
    }
    runtime().block_on(async {
        let streams = ChildStreams { stdin: Stdio::null(), stdout: Stdio::inherit(), stderr: Stdio::null() };
        let mut child = spawn(&shell("echo child $$; exec sleep 1000"), streams).unwrap();
        child.wait().await.unwrap();
    });
}

#[test]
fn kill_9_of_the_launcher_leaves_no_orphan() {
    let mut launcher = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["supervise::child::tests::helper_launcher", "--exact", "--nocapture"])
        .env("COX_TEST_HELPER", "1")
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut out = BufReader::new(launcher.stdout.take().unwrap());
    let mut line = String::new();
    while !line.contains("child ") {
        line.clear();
        assert_ne!(out.read_line(&mut line).unwrap(), 0, "the helper ended before its child was there");
    }
    let since = Instant::now();
    launcher.kill().unwrap();
    launcher.wait().unwrap();
    // The child inherited the pipe: it ends only when the child is gone.
    line.clear();
    while out.read_line(&mut line).unwrap() != 0 {}
    assert!(since.elapsed() < ENDED_WITHIN, "the child ended by itself after {:?}", since.elapsed());
}
