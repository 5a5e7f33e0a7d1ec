//! A coordinator that stands still instead of dying: stopped and continued, like a paused virtual machine or one whose disk hangs.

use std::{thread, time::Duration};

use nix::sys::signal::Signal;

use crate::support::{
    processes::{coordinator_of, signal, worker_of},
    tiny::Tiny,
};

/// Longer than any silence that a worker or a launcher may keep.
const FROZEN: Duration = Duration::from_secs(5);

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
    running.wait_for("the coordinator stood still");
    assert_eq!(workers, [0, 1].map(|rank| worker_of(launcher, rank)), "workers live on");
    assert_eq!(coordinator_of(launcher), Some(coordinator), "and so does their coordinator");
    let audit = tiny.assert_undisturbed(running, "a coordinator frozen for 5 s");
    assert_eq!(audit["faults"].as_array().map(Vec::len), Some(0), "{audit:#}");
}
