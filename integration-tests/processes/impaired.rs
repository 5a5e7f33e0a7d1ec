//! Networks as they are between real machines: packets that are lost, late or out of order, ways that are cut
//! in one direction, addresses of version 6 alone, and a name server that hangs.
//!
//! Two launchers on two machines (`support/machines.rs`), with TLS and a token, as they are off loopback.

use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use crate::support::{
    CoxProcess,
    machines::Machines,
    processes::{coordinator_of, signal, wait_for_coordinator, worker_of},
    tiny::{Tiny, audit},
};

const STEPS: u64 = 30;
const TOKEN: &str = "00112233445566778899aabbccddeeff";
/// The name of the first machine, where it is called by one.
const NAME: &str = "node0.cluster.test";

struct Cluster {
    machines: Machines,
    tiny: Tiny,
    endpoint: String,
}

impl Cluster {
    /// Nothing where there are no such machines.
    fn with(host: &str, steps: u64) -> Option<Self> {
        let (machines, tiny) = (Machines::start()?, Tiny::new(steps, 0));
        Some(Self { machines, tiny, endpoint: format!("{host}:29400") })
    }

    fn launch(&self, machine: usize) -> CoxProcess {
        let node_rank = format!("--node-rank={machine}");
        let flags = ["--nproc-per-node=1", "--nnodes=2", "--rdzv-conf=last_call_timeout=0"];
        let mut flags = flags.to_vec();
        flags.extend(["--rdzv-endpoint", &self.endpoint, &node_rank]);
        let mut command = self.tiny.command(&flags);
        command.env("COX_TOKEN", TOKEN);
        CoxProcess::of(self.machines.on(machine, &command))
    }

    fn start(&self) -> [CoxProcess; 2] {
        [self.launch(0), self.launch(1)]
    }

    /// Gives both machines a file of names that a test can change, and a name server that nobody is.
    fn take_name_server_away(&self) {
        let (hosts, servers) = (self.hosts(), self.hosts().with_file_name("resolv.conf"));
        self.know("127.0.0.1 localhost\n");
        std::fs::write(&servers, "nameserver 10.77.0.9\n").expect("a file");
        for machine in [0, 1] {
            let (hosts, servers) = (hosts.display(), servers.display());
            self.machines.shell(
                machine,
                &format!("mount --bind {hosts} /etc/hosts && mount --bind {servers} /etc/resolv.conf"),
            );
        }
    }

    fn hosts(&self) -> std::path::PathBuf {
        self.tiny.hold_dir().with_file_name("hosts")
    }

    /// Writes the file of names: in its place, for it is mounted.
    fn know(&self, names: &str) {
        std::fs::write(self.hosts(), names).expect("a file");
    }
}

/// Both end well, and nothing was lost.
fn assert_undisturbed(cluster: &Cluster, [first, second]: [CoxProcess; 2], faults: usize, what: &str) {
    let audit = cluster.tiny.assert_undisturbed(first, what);
    assert_eq!(audit["faults"].as_array().map(Vec::len), Some(faults), "{what}: {audit:#}");
    let (status, printed) = second.finish();
    assert!(status.success(), "{what}: {printed}");
}

#[test]
fn packets_that_are_lost_late_or_out_of_order_change_nothing() {
    let Some(mut cluster) = Cluster::with("10.77.0.1", STEPS) else { return };
    cluster.machines.weather(r#"{"loss": 0.01, "delay_ms": 4, "jitter_ms": 8}"#);
    let launched = cluster.start();
    assert_undisturbed(&cluster, launched, 0, "a bad network");
}

#[test]
fn a_way_that_is_cut_in_one_direction_is_found_as_one_that_is_cut_in_both() {
    for way in ["01", "10"] {
        let Some(mut cluster) = Cluster::with("10.77.0.1", STEPS) else { return };
        let [mut first, second] = cluster.start();
        first.wait_for(&format!("5/{STEPS} "));
        let (stays, lost) = (worker_of(first.pid(), 0), worker_of(second.pid(), 1));
        cluster.machines.weather(&format!(r#"{{"cut": ["{way}"]}}"#));
        let since = Instant::now();
        first.wait_for("no sign of life");
        let found = since.elapsed();
        cluster.machines.weather("{}");
        let healed = Instant::now();
        first.wait_for("from step");
        println!("cut {way}: found after {found:?}, trained {:?} after it was whole", healed.elapsed());
        assert!(found < Duration::from_secs(6), "{way}: found after {found:?}");
        assert_eq!(worker_of(first.pid(), 0), stays, "{way}: who was not cut off lives on");
        assert_ne!(worker_of(second.pid(), 1), lost, "{way}");
        assert_undisturbed(&cluster, [first, second], 1, way);
    }
}

#[test]
fn machines_with_addresses_of_version_6_alone_train_one_run() {
    let Some(cluster) = Cluster::with("[fd77::1]", 6) else { return };
    for machine in [0, 1] {
        cluster.machines.shell(machine, "ip -4 address flush scope global");
    }
    let launched = cluster.start();
    assert_undisturbed(&cluster, launched, 0, "IPv6 alone");
}

#[test]
fn a_coordinator_is_taken_over_at_an_address_of_version_6() {
    let Some(cluster) = Cluster::with("[fd77::1]", 100_000) else { return };
    let elastic = |machine| {
        let node_rank = format!("--node-rank={machine}");
        let flags = ["--nproc-per-node=1", "--nnodes=1:2", "--rdzv-conf=last_call_timeout=0"];
        let mut flags = flags.to_vec();
        flags.extend(["--rdzv-endpoint", &cluster.endpoint, &node_rank]);
        let mut command = cluster.tiny.command(&flags);
        command.env("COX_TOKEN", TOKEN);
        CoxProcess::of(cluster.machines.on(machine, &command))
    };
    let mut first = elastic(0);
    first.wait_for("2/100000");
    let mut second = elastic(1);
    first.wait_for("generation 2: 2 of 2 workers");
    first.wait_for("/100000");
    first.lose();
    let since = Instant::now();
    second.wait_for("this launcher starts a new coordinator");
    second.wait_for("generation 3: 1 of 2 workers");
    second.wait_for("/100000");
    println!("coordinator's machine gone: trained again after {:?}", since.elapsed());
    signal(second.pid() as i32, Signal::SIGTERM);
    let (status, printed) = second.finish();
    assert_eq!(status.code(), Some(143), "{printed}");
    let audit = audit(&cluster.tiny.output());
    assert_eq!((&audit["missing"], &audit["duplicate"]), (&0.into(), &0.into()), "{audit:#}\n{printed}");
}

#[test]
fn machines_whose_name_server_hangs_wait_for_it_and_meet_when_it_answers() {
    let Some(cluster) = Cluster::with(NAME, 6) else { return };
    cluster.take_name_server_away();
    let [mut first, mut second] = cluster.start();
    first.wait_for(&format!("{NAME} cannot be looked up"));
    second.wait_for(&format!("{NAME} cannot be looked up"));
    second.wait_for("waiting to join");
    cluster.know(&format!("127.0.0.1 localhost\n10.77.0.1 {NAME}\n"));
    let since = Instant::now();
    first.wait_for("1/6");
    println!("the name server answers: trained after {:?}", since.elapsed());
    assert_undisturbed(&cluster, [first, second], 0, "a name server that hangs at first");
}

#[test]
fn a_name_server_that_hangs_while_a_run_trains_costs_it_nothing() {
    let Some(cluster) = Cluster::with(NAME, 6) else { return };
    cluster.take_name_server_away();
    cluster.know(&format!("127.0.0.1 localhost\n10.77.0.1 {NAME}\n"));
    let held = cluster.tiny.hold(1, "backward", 3);
    let [first, mut second] = cluster.start();
    held.wait(&mut second);
    cluster.know("127.0.0.1 localhost\n");
    // All connections have to be made anew, to a name that nobody knows any more.
    let coordinator = coordinator_of(first.pid()).expect("it lives");
    signal(coordinator, Signal::SIGKILL);
    wait_for_coordinator(first.pid(), coordinator);
    let since = Instant::now();
    held.release();
    assert_undisturbed(&cluster, [first, second], 0, "a name server that hangs");
    println!("the coordinator was killed while no name could be looked up: over {:?} later", since.elapsed());
}
