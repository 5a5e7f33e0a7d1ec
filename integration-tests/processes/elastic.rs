//! Worlds that grow and shrink, and stops while something is being repaired.

use nix::sys::signal::Signal;
use serde_json::Value;

use crate::support::{
    CoxProcess, free_endpoint,
    processes::{signal, wait_for_worker, wait_until_gone, worker_of},
    read_json,
    tiny::{Tiny, audit},
};

/// A launcher of `workers` workers in a world of one or two nodes.
fn node(tiny: &Tiny, endpoint: &str, workers: u32, address: &str) -> CoxProcess {
    let nproc = format!("--nproc-per-node={workers}");
    let conf = "--rdzv-conf=last_call_timeout=0";
    tiny.start(&["--nnodes=1:2", &nproc, "--rdzv-endpoint", endpoint, conf, "--local-addr", address])
}

/// Stops the run at its coordinator's launcher: its ledger adds up, and its generations had so many workers.
/// The audit, and what was printed.
fn stop(tiny: &Tiny, first: CoxProcess, workers: &[u64]) -> (Value, String) {
    signal(first.pid() as i32, Signal::SIGTERM);
    let (status, printed) = first.finish();
    assert_eq!(status.code(), Some(143), "{printed}");
    let audit = audit(&tiny.output());
    assert_eq!((&audit["missing"], &audit["duplicate"]), (&0.into(), &0.into()), "{audit:#}\n{printed}");
    let generations = audit["generations"].as_array().expect("an array").iter();
    let worlds: Vec<_> = generations.map(|of| of["workers"].as_u64().expect("a number")).collect();
    assert_eq!(worlds, workers, "{audit:#}\n{printed}");
    (audit, printed)
}

#[test]
fn a_world_grows_when_a_machine_comes_and_shrinks_when_it_goes() {
    let tiny = Tiny::new(100_000, 0);
    let endpoint = free_endpoint();
    let mut first = node(&tiny, &endpoint, 1, "127.0.0.1");
    first.wait_for("2/100000");
    let second = node(&tiny, &endpoint, 1, "127.0.0.1");
    first.wait_for("generation 2: 2 of 2 workers");
    first.wait_for("/100000");
    signal(second.pid() as i32, Signal::SIGKILL);
    second.finish();
    first.wait_for("generation 3: 1 of 2 workers");
    first.wait_for("/100000");
    stop(&tiny, first, &[1, 2, 1]);
}

#[test]
fn sigterm_after_a_restart_still_drains_and_leaves_a_checkpoint() {
    let tiny = Tiny::new(100_000, 0);
    let mut running = tiny.start(&[]);
    running.wait_for("2/100000");
    let killed = worker_of(running.pid(), 1).expect("it lives");
    signal(killed, Signal::SIGKILL);
    wait_for_worker(running.pid(), 1, killed);
    signal(running.pid() as i32, Signal::SIGTERM);
    let (status, printed) = running.finish();
    assert_eq!(status.code(), Some(143), "{printed}");
    let stopped_at = read_json(&tiny.output().join("summary.json"))["steps"].as_u64().expect("a number");
    assert!(stopped_at >= 2, "{printed}");
    let checkpoint = tiny.output().join(format!("checkpoints/step-{stopped_at:08}/manifest.json"));
    assert!(checkpoint.exists(), "{}\n{printed}", checkpoint.display());
}

#[test]
fn a_launcher_that_gets_sigterm_takes_its_node_out_and_the_rest_trains_on() {
    let tiny = Tiny::new(100_000, 0);
    let endpoint = free_endpoint();
    let mut first = node(&tiny, &endpoint, 2, "127.0.0.1");
    first.wait_for("2/100000");
    let mut second = node(&tiny, &endpoint, 2, "127.0.0.2");
    first.wait_for("generation 2: 4 of 4 workers");
    first.wait_for("/100000");
    let stays = [0, 1].map(|rank| worker_of(first.pid(), rank).expect("it lives"));
    let goes = [2, 3].map(|rank| worker_of(second.pid(), rank).expect("it lives"));

    signal(second.pid() as i32, Signal::SIGTERM);
    second.wait_for("this node leaves the run; the others keep training");
    let (status, printed) = second.finish();
    assert_eq!(status.code(), Some(143), "{printed}");
    wait_until_gone(&goes);
    first.wait_for("generation 3: 2 of 4 workers");
    first.wait_for("/100000");

    // It comes back, and goes again because a person says so.
    let third = node(&tiny, &endpoint, 2, "127.0.0.2");
    first.wait_for("generation 4: 4 of 4 workers");
    first.wait_for("/100000");
    let message =
        tiny.asking(&["drain", "--node=1", "--endpoint", &endpoint]).output().expect("cox was built");
    assert!(message.status.success(), "{}", String::from_utf8_lossy(&message.stderr));
    let (status, printed) = third.finish();
    assert_eq!(status.code(), Some(0), "{printed}");
    first.wait_for("generation 5: 2 of 4 workers");
    first.wait_for("/100000");
    assert_eq!(stays, [0, 1].map(|rank| worker_of(first.pid(), rank).expect("it lives")), "processes stay");

    let message =
        tiny.asking(&["drain", "--node=0", "--endpoint", &endpoint]).output().expect("cox was built");
    assert!(
        !message.status.success()
            && String::from_utf8_lossy(&message.stderr).contains("stop the whole run instead")
    );
    let (_, printed) = stop(&tiny, first, &[2, 4, 2, 4, 2]);
    assert!(!printed.contains("rolled back") && !printed.contains("restarts 1"), "{printed}");
}

#[test]
fn the_node_of_the_coordinator_leaves_and_its_launcher_stays() {
    let tiny = Tiny::new(100_000, 0);
    let endpoint = free_endpoint();
    let mut first = node(&tiny, &endpoint, 1, "127.0.0.1");
    first.wait_for("2/100000");
    let second = node(&tiny, &endpoint, 1, "127.0.0.2");
    first.wait_for("generation 2: 2 of 2 workers");
    first.wait_for("/100000");
    let goes = worker_of(first.pid(), 0).expect("it lives");

    let message =
        tiny.asking(&["drain", "--node=0", "--endpoint", &endpoint]).output().expect("cox was built");
    assert!(message.status.success(), "{}", String::from_utf8_lossy(&message.stderr));
    first.wait_for("generation 3: 1 of 2 workers");
    wait_until_gone(&[goes]);
    first.wait_for("its launcher stays, because it hosts the coordinator");
    first.wait_for("/100000");
    let shown = tiny.asking(&["status", "--endpoint", &endpoint]).output().expect("cox was built");
    let shown = String::from_utf8_lossy(&shown.stdout);
    let line = "leaves the run: its workers have left; its launcher stays, because it hosts the coordinator";
    assert!(shown.contains(line), "{shown}");

    // Its machine goes away altogether: that ends the run, in order.
    let (audit, printed) = stop(&tiny, first, &[1, 2, 1]);
    let (status, rest) = second.finish();
    assert_eq!(status.code(), Some(0), "{rest}");
    let stopped_at = audit["committed_steps"].as_u64().expect("a number");
    assert_eq!(read_json(&tiny.output().join("summary.json"))["steps"], stopped_at, "{printed}");
}
