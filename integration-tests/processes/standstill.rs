//! Workers whose trainer stands still while their process heartbeats, in every phase that may last.

use std::time::{Duration, Instant};

use crate::support::tiny::Tiny;

/// Ten seconds, and what a loaded machine takes to beat, look and print.
const NAMED_WITHIN: Duration = Duration::from_secs(12);

/// Rank 1 stands in a phase of a step; it must be named with it, and replaced, and change nothing.
fn stands_still((phase, step): (&str, u64), named: &str) {
    let tiny = Tiny::new(6, 2);
    let held = tiny.hold(1, phase, step);
    let mut running = tiny.start(&[]);
    held.wait(&mut running);
    let since = Instant::now();
    let line = running.wait_for("stands still");
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
