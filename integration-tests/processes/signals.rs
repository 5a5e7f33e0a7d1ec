//! Signals as service managers, shells and people send them: to all processes of a launch, to one of its
//! children, to one that was started to outlive its terminal.

use std::{
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use nix::sys::signal::Signal;

use crate::support::{
    CoxProcess,
    processes::{children, coordinator_of, signal, wait_for_coordinator},
    read_json, root,
    tiny::Tiny,
};

#[test]
fn sigterm_to_every_process_of_a_launch_drains_it() {
    let tiny = Tiny::new(100_000, 0);
    let mut running = tiny.start(&[]);
    running.wait_for("2/100000");
    // As systemd stops a service, and `pkill cox` everything; the children first, which is worse.
    let processes = children(running.pid());
    assert_eq!(processes.len(), 3, "a coordinator and two workers");
    processes.into_iter().for_each(|child| signal(child, Signal::SIGTERM));
    signal(running.pid() as i32, Signal::SIGTERM);
    let (status, printed) = running.finish();
    assert_eq!(status.code(), Some(143), "{printed}");
    let steps = read_json(&tiny.output().join("summary.json"))["steps"].as_u64().expect("a number");
    let checkpoint = tiny.output().join(format!("checkpoints/step-{steps:08}/manifest.json"));
    assert!(steps >= 2 && checkpoint.exists(), "{}\n{printed}", checkpoint.display());
}

#[test]
fn an_end_that_a_scheduler_announces_is_answered_as_sigterm_is() {
    for (announced, code) in [
        (Signal::SIGUSR1, 138),
        (Signal::SIGUSR2, 140),
        (Signal::SIGALRM, 142),
        (Signal::SIGXCPU, 152),
        (Signal::SIGPWR, 158),
    ] {
        let tiny = Tiny::new(100_000, 0);
        let mut running = tiny.start(&[]);
        running.wait_for("2/100000");
        signal(running.pid() as i32, announced);
        let (status, printed) = running.finish();
        assert_eq!(status.code(), Some(code), "{printed}");
        let steps = read_json(&tiny.output().join("summary.json"))["steps"].as_u64().expect("a number");
        let checkpoint = tiny.output().join(format!("checkpoints/step-{steps:08}/manifest.json"));
        assert!(steps >= 2 && checkpoint.exists(), "{}\n{printed}", checkpoint.display());
    }
}

#[test]
fn a_coordinator_and_workers_that_are_asked_to_end_train_on() {
    let tiny = Tiny::new(6, 2);
    let held = tiny.hold(1, "backward", 3);
    let mut running = tiny.start(&[]);
    held.wait(&mut running);
    let processes = children(running.pid());
    for asked in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP, Signal::SIGQUIT] {
        processes.iter().for_each(|child| signal(*child, asked));
    }
    held.release();
    let audit = tiny.assert_undisturbed(running, "signals to all children");
    assert_eq!(audit["faults"].as_array().map(Vec::len), Some(0), "{audit:#}");
}

#[test]
fn a_launch_under_nohup_outlives_its_terminal() {
    let tiny = Tiny::new(6, 2);
    let (command, mut nohup) = (tiny.command(&[]), Command::new("nohup"));
    nohup.arg(command.get_program()).args(command.get_args());
    nohup.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
    nohup.current_dir(root()).stdin(Stdio::null());
    let mut running = CoxProcess::of(nohup);
    running.wait_for("2/6");
    signal(running.pid() as i32, Signal::SIGHUP);
    tiny.assert_undisturbed(running, "a terminal that has gone");
}

#[test]
fn workers_that_are_ended_before_they_have_a_checkpoint_are_named() {
    let tiny = Tiny::new(6, 0);
    let held = tiny.hold(1, "backward", 3);
    let mut running = tiny.start(&["--shutdown-timeout=1"]);
    held.wait(&mut running);
    signal(running.pid() as i32, Signal::SIGTERM);
    running.wait_for("ranks 0, 1 are still there after 1 s (--shutdown-timeout)");
    let (status, printed) = running.finish();
    assert_eq!(status.code(), Some(143), "{printed}");
}

#[test]
fn a_second_interrupt_ends_a_launch_without_waiting_for_anything() {
    let tiny = Tiny::new(6, 0);
    let held = tiny.hold(1, "backward", 3);
    let mut running = tiny.start(&[]);
    held.wait(&mut running);
    signal(running.pid() as i32, Signal::SIGINT);
    running.wait_for("finishing the current step");
    let since = Instant::now();
    signal(running.pid() as i32, Signal::SIGINT);
    let (status, printed) = running.finish();
    assert_eq!(status.code(), Some(130), "{printed}");
    // It waited 20 seconds for a coordinator that it had started again.
    assert!(since.elapsed() < Duration::from_secs(15) && !printed.contains("started again"), "{printed}");
}

#[test]
fn a_coordinator_whose_disk_fails_for_a_moment_is_started_until_it_lives() {
    let tiny = Tiny::new(6, 2);
    let held = tiny.hold(1, "backward", 3);
    let mut running = tiny.start(&[]);
    held.wait(&mut running);
    // Nothing can be written over a directory, not even by root.
    let run_file = tiny.output().join("run.json");
    std::fs::remove_file(&run_file).expect("a file");
    std::fs::create_dir(&run_file).expect("a directory");
    let coordinator = coordinator_of(running.pid()).expect("it lives");
    signal(coordinator, Signal::SIGKILL);
    running.wait_for("(exit code 1) and is started again in 1 s (restart 2 of at most 5");
    running.wait_for("(exit code 1) and is started again in 2 s (restart 3 of at most 5");
    std::fs::remove_dir(&run_file).expect("a directory");
    wait_for_coordinator(running.pid(), coordinator);
    held.release();
    tiny.assert_undisturbed(running, "a disk that failed for a moment");
}
