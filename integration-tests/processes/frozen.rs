//! A coordinator or a launcher that stands still instead of dying: stopped and continued, like a paused
//! virtual machine, or one whose disk hangs.

use std::{thread, time::Duration};

use nix::sys::signal::Signal;

use crate::support::{
    cox,
    processes::{coordinator_of, signal, worker_of},
    tiny::Tiny,
};

/// Longer than any silence that a worker or a launcher may keep.
const FROZEN: Duration = Duration::from_secs(5);
/// Longer than the coordinator keeps the line of a launcher that owes it a sign of life (15 s), and the place
/// of one without a line (3 s).
const STOPPED: Duration = Duration::from_secs(20);

#[test]
fn a_coordinator_that_is_frozen_for_seconds_loses_nobody() {
    let tiny = Tiny::new(60, 0);
    let mut running = tiny.start(&["train.global_batch=4"]);
    running.wait_for("3/60");
    let launcher = running.pid();
    let workers = [0, 1].map(|rank| worker_of(launcher, rank));
    let coordinator = coordinator_of(launcher).expect("it lives");
    signal(coordinator, Signal::SIGSTOP);
    // The fault itself: nobody can be asked when it has lasted long enough.
    thread::sleep(FROZEN);
    signal(coordinator, Signal::SIGCONT);
    let told = running.wait_for("the coordinator stalled");
    assert!(told.contains("none of its threads got CPU time"), "{told}");
    assert_eq!(workers, [0, 1].map(|rank| worker_of(launcher, rank)), "workers live on");
    assert_eq!(coordinator_of(launcher), Some(coordinator), "and so does their coordinator");
    let audit = tiny.assert_undisturbed(running, "a coordinator frozen for 5 s");
    assert_eq!(audit["faults"].as_array().map(Vec::len), Some(0), "{audit:#}");
}

#[test]
fn a_launcher_that_is_stopped_for_long_loses_nobody() {
    let tiny = Tiny::new(200, 0);
    let mut running = tiny.start(&["train.global_batch=4"]);
    running.wait_for("3/200");
    let ask = |what: &str| {
        let asked = cox(&[what, "--run"]).arg(tiny.output()).output().expect("cox was built");
        assert!(asked.status.success(), "{what}: {}", String::from_utf8_lossy(&asked.stderr));
    };
    // The run shall not be over before the launcher goes on.
    ask("pause");
    running.wait_for("paused");
    let launcher = running.pid();
    let workers = [0, 1].map(|rank| worker_of(launcher, rank));
    let process = i32::try_from(launcher).expect("a process id");
    signal(process, Signal::SIGSTOP);
    thread::sleep(STOPPED);
    signal(process, Signal::SIGCONT);
    ask("resume");
    assert_eq!(workers, [0, 1].map(|rank| worker_of(launcher, rank)), "workers live on");
    let audit = tiny.assert_undisturbed(running, "a launcher stopped for 20 s");
    assert_eq!(audit["faults"].as_array().map(Vec::len), Some(0), "{audit:#}");
}
