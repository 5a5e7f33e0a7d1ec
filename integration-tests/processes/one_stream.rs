//! Launchers that speak for their workers: whatever is lost behind one of them, the run learns the same bits.

use nix::sys::signal::Signal;

use crate::support::{
    CoxProcess, free_endpoint,
    processes::{coordinator_of, signal, wait_for_coordinator, worker_of},
    tiny::{Tiny, audit},
};

const STEPS: u64 = 6;

/// A launcher of two workers in a world of so many launchers.
fn node(tiny: &Tiny, endpoint: &str, nnodes: &str, rank: u32) -> CoxProcess {
    let (nnodes, node_rank) = (format!("--nnodes={nnodes}"), format!("--node-rank={rank}"));
    let flags = ["--one-stream", "--nproc-per-node=2", "--rdzv-endpoint", endpoint];
    tiny.start(&[&flags[..], &["--rdzv-conf=last_call_timeout=0", &nnodes, &node_rank]].concat())
}

/// The coordinator's connections, as the kernel lists them: those that are open at its port.
fn connections(port: u16) -> usize {
    let listed = std::fs::read_to_string("/proc/net/tcp").expect("Linux");
    let local = format!(":{port:04X}");
    let is_open = |line: &&str| {
        let fields: Vec<_> = line.split_whitespace().collect();
        fields.get(1).is_some_and(|address| address.ends_with(&local)) && fields.get(3) == Some(&"01")
    };
    listed.lines().filter(is_open).count()
}

#[test]
fn a_node_of_four_workers_has_one_connection_for_them_and_learns_the_same() {
    let tiny = Tiny::of_workers(4, STEPS);
    let held = tiny.hold(1, "backward", 3);
    let endpoint = free_endpoint();
    let mut running = tiny.start(&["--one-stream", "--nproc-per-node=4", "--rdzv-endpoint", &endpoint]);
    held.wait(&mut running);
    let port = endpoint.rsplit_once(':').and_then(|(_, port)| port.parse().ok()).expect("HOST:PORT");
    assert_eq!(connections(port), 1, "the launcher's, for itself and all workers");
    held.release();
    tiny.assert_undisturbed(running, "one stream");
}

#[test]
fn a_worker_that_is_killed_behind_its_launcher_is_back_and_nothing_is_lost() {
    for phase in ["loading", "communication", "checkpoint"] {
        let tiny = Tiny::new(STEPS, 2);
        let step = if phase == "loading" { 0 } else { 2 };
        let held = tiny.hold(1, phase, step);
        let mut running = tiny.start(&["--one-stream"]);
        held.wait(&mut running);
        signal(worker_of(running.pid(), 1).expect("it lives"), Signal::SIGKILL);
        let audit = tiny.assert_undisturbed(running, &format!("a worker killed in {phase}"));
        assert!(audit["faults"].as_array().is_some_and(|faults| !faults.is_empty()), "{phase}: {audit:#}");
    }
}

#[test]
fn a_coordinator_that_is_killed_is_found_again_through_the_launcher() {
    let tiny = Tiny::new(STEPS, 2);
    let held = tiny.hold(1, "backward", 3);
    let mut running = tiny.start(&["--one-stream"]);
    held.wait(&mut running);
    let killed = coordinator_of(running.pid()).expect("it lives");
    signal(killed, Signal::SIGKILL);
    wait_for_coordinator(running.pid(), killed);
    held.release();
    tiny.assert_undisturbed(running, "the coordinator killed");
}

#[test]
fn a_launcher_that_is_lost_costs_no_step_and_its_successor_is_taken_in() {
    let tiny = Tiny::of_workers(4, STEPS);
    let endpoint = free_endpoint();
    let held = tiny.hold(3, "communication", 3);
    let first = node(&tiny, &endpoint, "2", 0);
    let mut second = node(&tiny, &endpoint, "2", 1);
    held.wait(&mut second);
    second.lose();
    let third = node(&tiny, &endpoint, "2", 1);
    tiny.assert_undisturbed(first, "a launcher lost");
    let (status, printed) = third.finish();
    assert!(status.success(), "{printed}");
}

#[test]
fn a_standby_coordinator_is_found_through_the_launcher() {
    let tiny = Tiny::of_workers(4, 100_000);
    let endpoint = free_endpoint();
    let mut first = node(&tiny, &endpoint, "1:2", 0);
    first.wait_for("2/100000");
    let mut second = node(&tiny, &endpoint, "1:2", 1);
    first.wait_for("generation 2: 4 of 4 workers");
    first.wait_for("/100000");
    first.lose();
    second.wait_for("this launcher starts a new coordinator");
    second.wait_for("generation 3: 2 of 4 workers");
    second.wait_for("/100000");
    signal(second.pid() as i32, Signal::SIGTERM);
    let (status, printed) = second.finish();
    assert_eq!(status.code(), Some(143), "{printed}");
    assert!(!printed.contains("rolled back"), "{printed}");
    let audit = audit(&tiny.output());
    assert_eq!((&audit["missing"], &audit["duplicate"]), (&0.into(), &0.into()), "{audit:#}\n{printed}");
}

#[test]
fn a_worker_that_is_frozen_behind_its_launcher_is_found_by_its_silence() {
    let tiny = Tiny::new(STEPS, 2);
    let held = tiny.hold(1, "forward", 3);
    let mut running = tiny.start(&["--one-stream"]);
    held.wait(&mut running);
    signal(worker_of(running.pid(), 1).expect("it lives"), Signal::SIGSTOP);
    tiny.assert_undisturbed(running, "a worker frozen");
}
