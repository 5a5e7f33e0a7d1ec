//! Worlds that grow and shrink, and stops while something is being repaired.

use nix::sys::signal::Signal;

use crate::support::{
    free_endpoint,
    processes::{signal, wait_for_worker, worker_of},
    read_json,
    tiny::{Tiny, audit},
};

#[test]
fn a_world_grows_when_a_machine_comes_and_shrinks_when_it_goes() {
    let tiny = Tiny::new(100_000, 0);
    let endpoint = free_endpoint();
    let node = || {
        let flags = [
            "--nnodes=1:2",
            "--nproc-per-node=1",
            "--rdzv-endpoint",
            &endpoint,
            "--rdzv-conf=last_call_timeout=0",
        ];
        tiny.start(&flags)
    };
    let mut first = node();
    first.wait_for("2/100000");
    let second = node();
    first.wait_for("generation 2: 2 of 2 workers");
    first.wait_for("/100000");
    signal(second.pid() as i32, Signal::SIGKILL);
    second.finish();
    first.wait_for("generation 3: 1 of 2 workers");
    first.wait_for("/100000");
    signal(first.pid() as i32, Signal::SIGTERM);
    let (status, printed) = first.finish();
    assert_eq!(status.code(), Some(143), "{printed}");
    let audit = audit(&tiny.output());
    assert_eq!((&audit["missing"], &audit["duplicate"]), (&0.into(), &0.into()), "{audit:#}\n{printed}");
    let worlds: Vec<_> =
        audit["generations"].as_array().expect("an array").iter().map(|g| &g["workers"]).collect();
    assert_eq!(worlds, [1, 2, 1], "{audit:#}\n{printed}");
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
