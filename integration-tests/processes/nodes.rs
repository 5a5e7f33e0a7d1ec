//! A whole machine of several workers is lost at once: what its shards' replicas are for. No checkpoint is
//! written before the end, so that a step that cannot be gone on from takes the run back to its beginning.

use std::time::Instant;

use nix::sys::signal::Signal;

use crate::support::{
    CoxProcess, free_endpoint,
    processes::signal,
    tiny::{Tiny, audit},
};

/// A launcher of two workers.
fn node(tiny: &Tiny, endpoint: &str, nnodes: &str, rank: u32) -> CoxProcess {
    let (nnodes, node_rank) = (format!("--nnodes={nnodes}"), format!("--node-rank={rank}"));
    let flags = ["--nproc-per-node=2", "--rdzv-endpoint", endpoint, "--rdzv-conf=last_call_timeout=0"];
    tiny.start(&[&[nnodes.as_str(), &node_rank], &flags[..]].concat())
}

#[test]
fn a_fixed_world_repeats_no_step_when_a_node_is_lost_in_any_phase_and_comes_back() {
    for phase in ["forward", "communication", "optimizer"] {
        let tiny = Tiny::of_workers(4, 6);
        let endpoint = free_endpoint();
        let held = tiny.hold(3, phase, 3);
        let first = node(&tiny, &endpoint, "2", 0);
        let mut second = node(&tiny, &endpoint, "2", 1);
        held.wait(&mut second);
        second.lose();
        let third = node(&tiny, &endpoint, "2", 1);
        let what = format!("a node lost in {phase}");
        let audit = tiny.assert_undisturbed(first, &what);
        let generations = audit["generations"].as_array().expect("an array").iter();
        let states: Vec<_> = generations.map(|of| (&of["first_step"], &of["source"])).collect();
        assert_eq!(states.len(), 2, "{what}: {audit:#}");
        let (step, source) = states[1];
        assert!(step.as_u64() >= Some(3) && source == "replica", "{what}: {audit:#}");
        let (status, printed) = third.finish();
        assert!(status.success(), "{what}: {printed}");
    }
}

#[test]
fn a_node_with_another_run_file_is_refused_with_the_keys_that_differ() {
    for is_first in [false, true] {
        let tiny = Tiny::of_workers(4, 6);
        let endpoint = free_endpoint();
        let mut first = (!is_first).then(|| node(&tiny, &endpoint, "2", 0));
        first.iter_mut().for_each(|first| drop(first.wait_for("coordinator here")));
        let flags = [
            "--nproc-per-node=2",
            "--nnodes=2",
            "--node-rank=1",
            "--rdzv-endpoint",
            &endpoint,
            "lora.rank=3",
        ];
        let mut other = tiny.start(&flags);
        if is_first {
            other.wait_for("waiting to join");
        }
        let mut first = first.unwrap_or_else(|| node(&tiny, &endpoint, "2", 0));
        let (status, printed) = other.finish();
        assert_eq!(status.code(), Some(2), "{printed}");
        assert!(
            printed.contains("this node has another specification of run quickstart: lora.rank ("),
            "{printed}"
        );
        let line = first.wait_for("refused a node on");
        assert!(line.contains("lora.rank (") && line.contains("3 here"), "{line}");
        let second = node(&tiny, &endpoint, "2", 1);
        tiny.assert_undisturbed(first, "a node that was refused");
        let (status, printed) = second.finish();
        assert!(status.success() && printed.contains("the run has ended"), "{printed}");
        assert!(!printed.contains("waiting to join"), "the refused node has taken none: {printed}");
    }
}

#[test]
fn an_elastic_world_trains_on_at_the_same_step_without_whichever_node_is_lost() {
    for coordinators in [false, true] {
        let tiny = Tiny::of_workers(4, 100_000);
        let endpoint = free_endpoint();
        let mut first = node(&tiny, &endpoint, "1:2", 0);
        first.wait_for("2/100000");
        let second = node(&tiny, &endpoint, "1:2", 1);
        first.wait_for("generation 2: 4 of 4 workers");
        first.wait_for("/100000");
        let (lost, mut left) = if coordinators { (first, second) } else { (second, first) };
        lost.lose();
        let line = left.wait_for("generation 3: 2 of 4 workers");
        assert!(line.contains("(state: replica)"), "{line}");
        left.wait_for("/100000");
        signal(left.pid() as i32, Signal::SIGTERM);
        let (status, printed) = left.finish();
        assert_eq!(status.code(), Some(143), "{printed}");
        assert!(!printed.contains("rolled back"), "{printed}");
        let audit = audit(&tiny.output());
        assert_eq!((&audit["missing"], &audit["duplicate"]), (&0.into(), &0.into()), "{audit:#}\n{printed}");
    }
}

#[test]
fn a_node_of_four_slots_is_lost_at_once_and_no_step_is_repeated() {
    let tiny = Tiny::of_workers(8, 100_000);
    let endpoint = free_endpoint();
    let node = |rank: u32| {
        let node_rank = format!("--node-rank={rank}");
        let flags =
            ["train.global_batch=8", "--nnodes=1:2", "--nproc-per-node=4", "--rdzv-endpoint", &endpoint];
        tiny.start(&[&flags[..], &["--rdzv-conf=last_call_timeout=0", &node_rank]].concat())
    };
    let mut first = node(0);
    first.wait_for("2/100000");
    let second = node(1);
    first.wait_for("generation 2: 8 of 8 workers");
    first.wait_for("/100000");
    let since = Instant::now();
    second.lose();
    let line = first.wait_for("generation 3: 4 of 8 workers");
    assert!(line.contains("(state: replica)"), "{line}");
    first.wait_for("/100000");
    println!("a node of four slots lost: the next step {:?} later", since.elapsed());
    signal(first.pid() as i32, Signal::SIGTERM);
    let (status, printed) = first.finish();
    assert_eq!(status.code(), Some(143), "{printed}");
    assert!(!printed.contains("rolled back"), "{printed}");
    let audit = audit(&tiny.output());
    assert_eq!((&audit["missing"], &audit["duplicate"]), (&0.into(), &0.into()), "{audit:#}\n{printed}");
}
