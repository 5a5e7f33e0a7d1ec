//! Worlds of processes: over the ring on any machine, over NCCL where there is a GPU.
//!
//! NCCL refuses two ranks on one GPU of one host, and believes what `NCCL_HOSTID` says of the host. So with
//! an id of its own in each process, and sockets for transport, several ranks share a GPU.

use std::{
    collections::BTreeSet,
    io::{BufRead, BufReader, Write},
    process::{Child, ChildStdin, Command, Stdio},
    sync::mpsc::{self, Receiver},
    time::{Duration, Instant},
};

use coxswain_worker::collective::conformance::Behaviour;

use crate::{
    gpus_with_nccl,
    rank::{MARK, ON_GPU, SLOT, TEST},
};

/// How long an answer may take: NCCL connects anew for every behaviour.
const PATIENCE: Duration = Duration::from_secs(120);
/// How long survivors may take to notice; the figure is printed.
const NOTICED: Duration = Duration::from_secs(10);

#[derive(Clone, Copy, PartialEq)]
enum Transport {
    Ring,
    Nccl,
}

/// A process that is one rank; killed with the value.
struct Process {
    child: Child,
    stdin: ChildStdin,
    answers: Receiver<String>,
    address: String,
}

impl Process {
    fn start(rank: usize, world: usize, over: Transport) -> Self {
        let name = if over == Transport::Nccl { "nccl" } else { "ring" };
        let mut child = Command::new(std::env::current_exe().expect("a test has a binary"))
            .args(["--exact", TEST, "--nocapture"])
            .env(SLOT, format!("{rank} {world} {name}"))
            .env("NCCL_HOSTID", format!("rank{rank}"))
            .env("NCCL_NET", "Socket")
            .env("NCCL_SOCKET_IFNAME", "lo")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the test binary starts again");
        let stdin = child.stdin.take().expect("piped");
        let stdout = BufReader::new(child.stdout.take().expect("piped"));
        let (found, answers) = mpsc::channel();
        std::thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                if let Some((_, answer)) = line.split_once(MARK)
                    && found.send(answer.to_owned()).is_err()
                {
                    return;
                }
            }
        });
        let mut process = Self { child, stdin, answers, address: String::new() };
        process.address = process.answer(PATIENCE).strip_prefix("at ").expect("its address").to_owned();
        process
    }

    fn tell(&mut self, what: &str) {
        writeln!(self.stdin, "{what}").expect("the rank listens");
    }

    fn answer(&self, patience: Duration) -> String {
        let answer = self.answers.recv_timeout(patience);
        answer.unwrap_or_else(|error| panic!("a rank gave no answer within {patience:?}: {error}"))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // One that has ended needs no killing.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

struct World {
    ranks: Vec<Process>,
    over: Transport,
}

impl World {
    fn new(world: usize, over: Transport) -> Self {
        Self { ranks: (0..world).map(|rank| Process::start(rank, world, over)).collect(), over }
    }

    fn tell_all(&mut self, order: &str) {
        let addresses: Vec<&str> = self.ranks.iter().map(|rank| rank.address.as_str()).collect();
        let order = format!("{order} {}", addresses.join(","));
        self.ranks.iter_mut().for_each(|rank| rank.tell(&order));
    }

    /// The first `count` behaviours, from this generation on.
    fn passes(&mut self, generation: u64, count: usize) {
        self.tell_all(&format!("suite {generation} {count}"));
        let mut seen = BTreeSet::new();
        for rank in &self.ranks {
            loop {
                let answer = rank.answer(PATIENCE);
                match answer.strip_prefix("seen ") {
                    Some(name) => drop(seen.insert(name.to_owned())),
                    None if answer == "done" => break,
                    None => panic!("{answer}"),
                }
            }
        }
        for due in Behaviour::of_world(self.ranks.len(), self.over == Transport::Ring).take(count) {
            assert!(seen.contains(due.name), "no rank has seen that {}", due.name);
        }
        if self.over == Transport::Nccl && count == usize::MAX {
            assert!(seen.contains(ON_GPU), "no rank has seen that {ON_GPU}");
        }
    }

    /// Kills the last rank while all move data; the others must notice, and form the next generation with a
    /// new one.
    fn survives_a_kill(&mut self, generation: u64) {
        self.tell_all(&format!("endure {generation}"));
        for rank in &self.ranks {
            assert_eq!(rank.answer(PATIENCE), "moving");
        }
        let killed = Instant::now();
        drop(self.ranks.pop());
        for (number, rank) in self.ranks.iter().enumerate() {
            let answer = rank.answer(NOTICED);
            println!("rank {number} after {:.1?}: {answer}", killed.elapsed());
            assert!(answer.starts_with("ended ") && killed.elapsed() < NOTICED, "{answer}");
        }
        let world = self.ranks.len() + 1;
        self.ranks.push(Process::start(world - 1, world, self.over));
        self.passes(generation + 1, 1);
    }
}

fn everything(over: Transport, worlds: &[usize]) {
    for &size in worlds {
        let began = Instant::now();
        let mut world = World::new(size, over);
        world.passes(1, usize::MAX);
        if size > 1 {
            world.survives_a_kill(1000);
        }
        println!("a world of {size} processes: {:.1?}", began.elapsed());
    }
}

#[test]
fn ranks_in_processes_pass_the_suite_over_the_ring_and_outlive_one_that_is_killed() {
    everything(Transport::Ring, &[1, 2, 4]);
}

#[test]
fn ranks_on_one_gpu_pass_the_suite_over_nccl_and_outlive_one_that_is_killed() {
    if gpus_with_nccl("the collectives over NCCL").is_some() {
        everything(Transport::Nccl, &[1, 2, 4]);
    }
}
