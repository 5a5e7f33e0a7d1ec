//! Workers whose trainer stands still while their process heartbeats, where no step's time is known yet.

use std::time::{Duration, Instant};

use crate::support::tiny::Tiny;

/// Rank 1 stands in a phase from the first step on; it must be named with it, and replaced, and change nothing.
fn stands_still(phase: &str, named: &str) {
    let tiny = Tiny::new(6, 2);
    let held = tiny.hold(1, phase, 0);
    let mut running = tiny.start(&[]);
    held.wait(&mut running);
    let since = Instant::now();
    let line = running.wait_for("stands still");
    assert!(line.contains("rank 1") && line.contains(named), "{line}");
    assert!(since.elapsed() < Duration::from_secs(25), "found after {:?}", since.elapsed());
    let audit = tiny.assert_undisturbed(running, phase);
    assert_eq!(audit["faults"].as_array().map(Vec::len), Some(1), "{audit:#}");
}

#[test]
fn a_rank_that_never_calls_its_neighbours_is_named_and_replaced() {
    stands_still("connecting", "connect of step 0");
}

#[test]
fn a_rank_that_stands_still_in_its_first_step_is_named_and_replaced() {
    stands_still("forward", "forward of step 0");
}
