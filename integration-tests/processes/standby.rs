//! Worlds whose coordinator is lost with its machine: a launcher elsewhere starts another one.

use coxswain_identity::claims::Claims;
use nix::sys::signal::Signal;

use crate::support::{
    CoxProcess, free_endpoint,
    processes::signal,
    tiny::{Tiny, audit},
};

/// What a launcher says that has taken the coordinator over.
const TAKEN_OVER: &str = "this launcher starts a new coordinator";

/// A launcher of one worker.
fn node(tiny: &Tiny, endpoint: &str, nnodes: &str, rank: u32) -> CoxProcess {
    let (nnodes, node_rank) = (format!("--nnodes={nnodes}"), format!("--node-rank={rank}"));
    let flags = ["--nproc-per-node=1", "--rdzv-endpoint", endpoint, "--rdzv-conf=last_call_timeout=0"];
    tiny.start(&[&[nnodes.as_str(), &node_rank], &flags[..]].concat())
}

#[test]
fn an_elastic_world_trains_on_without_the_machine_of_its_coordinator() {
    let tiny = Tiny::new(100_000, 0);
    let endpoint = free_endpoint();
    let mut first = node(&tiny, &endpoint, "1:2", 0);
    first.wait_for("2/100000");
    let mut second = node(&tiny, &endpoint, "1:2", 1);
    first.wait_for("generation 2: 2 of 2 workers");
    first.wait_for("/100000");
    first.lose();
    second.wait_for(TAKEN_OVER);
    second.wait_for("generation 3: 1 of 2 workers");
    second.wait_for("/100000");
    // Commands find it where it is now.
    let shown = crate::support::cox(&["status", "--run"]).arg(tiny.output()).output().expect("cox was built");
    assert!(shown.status.success(), "{}", String::from_utf8_lossy(&shown.stderr));
    signal(second.pid() as i32, Signal::SIGTERM);
    let (status, printed) = second.finish();
    assert_eq!(status.code(), Some(143), "{printed}");
    assert!(!printed.contains("rolled back"), "{printed}");
    let audit = audit(&tiny.output());
    assert_eq!((&audit["missing"], &audit["duplicate"]), (&0.into(), &0.into()), "{audit:#}\n{printed}");
}

#[test]
fn a_fixed_world_waits_for_another_machine_and_learns_the_same() {
    let tiny = Tiny::new(6, 2);
    let endpoint = free_endpoint();
    let held = tiny.hold(1, "backward", 3);
    let first = node(&tiny, &endpoint, "2", 0);
    let mut second = node(&tiny, &endpoint, "2", 1);
    held.wait(&mut second);
    first.lose();
    second.wait_for(TAKEN_OVER);
    held.release();
    // Called to where the coordinator was, it finds it where it is.
    let third = node(&tiny, &endpoint, "2", 0);
    tiny.assert_undisturbed(second, "the machine of the coordinator lost");
    let (status, printed) = third.finish();
    assert!(status.success(), "{printed}");
}

#[test]
fn a_launcher_that_wakes_up_beside_its_coordinators_successor_ends() {
    let tiny = Tiny::new(100_000, 0);
    let endpoint = free_endpoint();
    let mut first = node(&tiny, &endpoint, "1:2", 0);
    first.wait_for("2/100000");
    let claims = Claims::of_run(&tiny.output());
    let claim = claims.newest().expect("it has announced its coordinator");
    assert_eq!(claim.address, endpoint);
    claims.succeed(claim.number, "127.0.0.1:1", "another").expect("a file").expect("nobody was faster");
    let (status, printed) = first.finish();
    assert_eq!(status.code(), Some(6), "{printed}");
    assert!(printed.contains("has replaced this launcher's coordinator"), "{printed}");
}
