//! Workers whose trainer stands still while their process heartbeats, in every phase that may last; and one
//! that never heartbeats.

use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use crate::support::{
    processes::{signal, wait_until_gone, worker_of},
    tiny::Tiny,
};

/// Ten seconds, and what a loaded machine takes to beat, look and print.
const NAMED_WITHIN: Duration = Duration::from_secs(12);

/// Rank 1 stands in a phase of a step; it must be named with it, and replaced, and change nothing.
fn stands_still((phase, step): (&str, u64), named: &str) {
    let tiny = Tiny::new(6, 2);
    let held = tiny.hold(1, phase, step);
    let mut running = tiny.start(&[]);
    held.wait(&mut running);
    let since = Instant::now();
    let line = running.wait_for("no progress:");
    let took = since.elapsed();
    assert!(line.contains("rank 1") && line.contains(named), "{line}");
    assert!(took < NAMED_WITHIN, "named after {took:?}: {line}");
    let audit = tiny.assert_undisturbed(running, phase);
    assert_eq!(audit["faults"].as_array().map(Vec::len), Some(1), "{audit:#}");
}

#[test]
fn a_rank_that_stands_still_while_it_loads_is_named_and_replaced() {
    stands_still(("loading", 0), "load of step 0");
}

#[test]
fn a_rank_that_never_calls_its_neighbours_is_named_and_replaced() {
    stands_still(("connecting", 0), "connect of step 0");
}

#[test]
fn a_rank_that_stands_still_in_its_first_step_is_named_and_replaced() {
    stands_still(("forward", 0), "forward of step 0");
}

#[test]
fn a_rank_that_stands_still_while_it_writes_a_checkpoint_is_named_and_replaced() {
    stands_still(("checkpoint", 2), "checkpoint of step 2");
}

#[test]
fn a_rank_that_stands_still_in_evaluation_is_named_and_replaced() {
    stands_still(("evaluation", 6), "evaluation of step 6");
}

#[test]
fn a_worker_that_is_stopped_before_it_has_made_itself_known_is_named_and_replaced() {
    let tiny = Tiny::new(6, 2);
    let held = tiny.hold(1, "joining", 0);
    let mut running = tiny.start(&[]);
    held.wait(&mut running);
    let stopped = worker_of(running.pid(), 1).expect("it lives");
    signal(stopped, Signal::SIGSTOP);
    let since = Instant::now();
    let line = running.wait_for("has not registered");
    // Three seconds more than elsewhere: no start is expected to take less than one.
    let took = since.elapsed();
    assert!(took < NAMED_WITHIN + Duration::from_secs(3), "named after {took:?}: {line}");
    assert!(line.contains("rank 1") && line.contains("; it is declared lost unless "), "{line}");
    running.wait_for("rank 1 on");
    wait_until_gone(&[stopped]);
    let audit = tiny.assert_undisturbed(running, "stopped at its start");
    let faults = audit["faults"].as_array().expect("an array");
    assert!(
        matches!(&faults[..], [fault] if fault["text"].as_str().is_some_and(|text| text.contains("in starting"))),
        "{audit:#}"
    );
}
