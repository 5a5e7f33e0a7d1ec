//! A machine whose network is cut and comes back: nothing is closed, nothing is refused, nothing arrives.
//!
//! Two launchers share a machine here, each with addresses of its own. Everything that the second one sends
//! to the coordinator, and everything between the two ranks, passes through proxies that can stop forwarding.

use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use crate::support::{
    CoxProcess, free_endpoint,
    processes::{signal, worker_of},
    proxy::Proxy,
    tiny::{Tiny, audit},
};

const STEPS: u64 = 60;

/// Two nodes of one worker each, and the network between them.
struct Cluster {
    tiny: Tiny,
    first: CoxProcess,
    second: CoxProcess,
    /// The second node's way to the coordinator.
    control: Proxy,
    /// Each rank's way to the other.
    data: [Proxy; 2],
}

impl Cluster {
    fn start(steps: u64, flags: &[&str]) -> Self {
        let tiny = Tiny::new(steps, 0);
        let coordinator = free_endpoint();
        let control = Proxy::start(&free_endpoint(), &coordinator);
        let targets = [free_endpoint(), free_endpoint()];
        let data = targets.each_ref().map(|target| Proxy::start(&free_endpoint(), target));
        let node = |endpoint: &str, rank: usize, host: &str| {
            let node_rank = format!("--node-rank={rank}");
            let mut all =
                vec!["--nproc-per-node=1", "--rdzv-endpoint", endpoint, &node_rank, "--rdzv-conf", host];
            all.extend(flags);
            let mut command = tiny.command(&all);
            let port = targets[rank].rsplit(':').next().expect("HOST:PORT");
            command.env("COX_DATA_PORT", port).env("COX_ADVERTISE", &data[rank].address);
            // What two ranks of one machine share no network can cut.
            command.env("COX_RING_SHARED_MEMORY", "0");
            CoxProcess::of(command)
        };
        let mut first = node(&coordinator, 0, "is_host=true,last_call_timeout=0");
        if flags.contains(&"--nnodes=1:2") {
            first.wait_for(&format!("2/{steps}"));
        }
        let second = node(&control.address, 1, "is_host=false,last_call_timeout=0");
        Self { first, second, control, data, tiny }
    }

    fn cut(&self) {
        self.control.cut();
        self.data.iter().for_each(Proxy::cut);
    }

    fn heal(&self) {
        self.control.heal();
        self.data.iter().for_each(Proxy::heal);
    }
}

/// A line that tells of the loss came in time: heartbeats are missed after three seconds.
fn assert_found_in_time(since: Instant) {
    let took = since.elapsed();
    assert!(took < Duration::from_secs(6), "found after {took:?}");
}

#[test]
fn a_machine_that_was_cut_off_and_comes_back_changes_no_bit() {
    let mut cluster = Cluster::start(STEPS, &["--nnodes=2"]);
    cluster.first.wait_for(&format!("10/{STEPS} "));
    let (stays, cut_off) = (worker_of(cluster.first.pid(), 0), worker_of(cluster.second.pid(), 1));
    cluster.cut();
    let since = Instant::now();
    cluster.first.wait_for("no sign of life");
    assert_found_in_time(since);
    cluster.heal();
    // The worker that was given up hears of it and ends; another one takes its place.
    cluster.first.wait_for("from step");
    assert_eq!(worker_of(cluster.first.pid(), 0), stays, "who was not cut off lives on");
    assert_ne!(worker_of(cluster.second.pid(), 1), cut_off);
    let audit = cluster.tiny.assert_undisturbed(cluster.first, "a network that was cut");
    assert_eq!(audit["faults"].as_array().map(Vec::len), Some(1), "{audit:#}");
    let (status, printed) = cluster.second.finish();
    assert!(status.success(), "{printed}");
}

#[test]
fn a_worker_that_cannot_reach_the_coordinator_is_replaced_though_its_neighbours_can_reach_it() {
    let mut cluster = Cluster::start(STEPS, &["--nnodes=2"]);
    cluster.first.wait_for(&format!("10/{STEPS} "));
    cluster.control.cut();
    let since = Instant::now();
    cluster.first.wait_for("no sign of life");
    assert_found_in_time(since);
    cluster.control.heal();
    let audit = cluster.tiny.assert_undisturbed(cluster.first, "a way to the coordinator that was cut");
    assert_eq!(audit["faults"].as_array().map(Vec::len), Some(1), "{audit:#}");
    let (status, printed) = cluster.second.finish();
    assert!(status.success(), "{printed}");
}

#[test]
fn ranks_that_cannot_reach_each_other_try_again_and_go_on_when_they_can() {
    let mut cluster = Cluster::start(STEPS, &["--nnodes=2"]);
    cluster.first.wait_for(&format!("10/{STEPS} "));
    cluster.data.iter().for_each(Proxy::cut);
    let since = Instant::now();
    // Both heartbeat, both wait in the same collective: nobody is to blame.
    cluster.first.wait_for("none makes progress");
    assert!(since.elapsed() < Duration::from_secs(20), "found after {:?}", since.elapsed());
    cluster.data.iter().for_each(Proxy::heal);
    cluster.tiny.assert_undisturbed(cluster.first, "a data network that was cut");
    let (status, printed) = cluster.second.finish();
    assert!(status.success(), "{printed}");
}

#[test]
fn an_elastic_world_goes_on_without_the_machine_that_was_cut_off_and_takes_it_back() {
    let mut cluster = Cluster::start(100_000, &["--nnodes=1:2"]);
    cluster.first.wait_for("generation 2: 2 of 2 workers");
    cluster.first.wait_for("/100000");
    cluster.cut();
    cluster.first.wait_for("1 of 2 workers");
    cluster.first.wait_for("/100000");
    cluster.heal();
    cluster.first.wait_for("2 of 2 workers");
    cluster.first.wait_for("/100000");
    signal(cluster.first.pid() as i32, Signal::SIGTERM);
    let (status, printed) = cluster.first.finish();
    assert_eq!(status.code(), Some(143), "{printed}");
    let audit = audit(&cluster.tiny.output());
    assert_eq!((&audit["missing"], &audit["duplicate"]), (&0.into(), &0.into()), "{audit:#}\n{printed}");
    assert!(!printed.contains("rolled back"), "{printed}");
}
