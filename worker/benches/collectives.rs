//! Collectives of the ring on one machine, one process per rank.
//!
//! ```text
//! cargo bench --bench collectives                     a table for 2 and 4 ranks, in shared memory and over
//!                                                     sockets, turn by turn
//! python integration-tests/bench/collectives.py       the same next to Gloo, turn by turn
//! ```
//!
//! As a rank (`--rank R --world W`, over sockets with `--sockets`) it prints its address, reads the addresses
//! of all ranks (one line, separated by spaces), then commands `operation bytes repeats`, and answers each
//! with the seconds that one repeat took. The table and the Python driver speak this protocol. Bytes are
//! those of the whole buffer.

use std::{
    io::{BufRead, BufReader, Write},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use coxswain_proto::ids::{Generation, Rank};
use coxswain_worker::collective::{
    Buf, BufMut, Collective, Membership, Reduce, Ring, RingAbort, RingListener,
};

const SOCKETS: &str = "--sockets";

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().collect();
    let value = |flag: &str| args.iter().position(|arg| arg == flag).and_then(|at| args.get(at + 1));
    match (value("--rank"), value("--world")) {
        (Some(rank), Some(world)) => {
            be_a_rank(rank.parse()?, world.parse()?, !args.iter().any(|arg| arg == SOCKETS))
        }
        _ => table(),
    }
}

fn be_a_rank(rank: u32, world: usize, shared_memory: bool) -> Result<()> {
    let listener = RingListener::bind("127.0.0.1:0")?.with_shared_memory(shared_memory);
    println!("{}", listener.address());
    let mut lines = std::io::stdin().lines();
    let peers: Vec<String> =
        lines.next().context("no addresses")??.split_whitespace().map(str::to_owned).collect();
    let membership = Membership::among("bench", Generation(1), Rank(rank), &peers);
    let deadline = Instant::now() + Duration::from_secs(30);
    let mut ring = Ring::connect(&listener, &membership, deadline, &RingAbort::new())?;
    let mut buffers = Buffers::default();
    for line in lines {
        let line = line?;
        let mut words = line.split_whitespace();
        let operation = words.next().context("no operation")?;
        let bytes: usize = words.next().context("no bytes")?.parse()?;
        let repeats: u32 = words.next().context("no repeats")?.parse()?;
        buffers.resize(bytes, world);
        ring.barrier()?;
        let begin = Instant::now();
        for _ in 0..repeats {
            buffers.run(&mut ring, operation)?;
        }
        println!("{}", begin.elapsed().as_secs_f64() / f64::from(repeats));
    }
    Ok(())
}

#[derive(Default)]
struct Buffers {
    whole: Vec<f32>,
    part: Vec<f32>,
}

impl Buffers {
    fn resize(&mut self, bytes: usize, world: usize) {
        let part = (bytes / 4).div_ceil(world);
        if self.part.len() != part {
            (self.whole, self.part) = (vec![1.0; part * world], vec![1.0; part]);
        }
    }

    fn run(&mut self, ring: &mut Ring, operation: &str) -> Result<()> {
        let whole = BufMut::F32(&mut self.whole);
        match operation {
            "all_reduce" => ring.all_reduce(whole, Reduce::Sum)?,
            "reduce_scatter" => ring.reduce_scatter_in_place(whole, Reduce::Sum)?,
            "all_gather" => ring.all_gather(Buf::F32(&self.part), whole)?,
            "all_gather_in_place" => ring.all_gather_in_place(whole)?,
            "broadcast" => ring.broadcast(whole, Rank(0))?,
            "barrier" => ring.barrier()?,
            other => bail!("unknown operation {other}"),
        }
        Ok(())
    }
}

/// One rank as a process.
struct Worker {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Worker {
    fn start(rank: usize, world: usize, over: &[&str]) -> Result<(Self, String)> {
        let mut child = Command::new(std::env::current_exe()?)
            .args(["--rank", &rank.to_string(), "--world", &world.to_string()])
            .args(over)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let input = child.stdin.take().context("stdin is piped")?;
        let output = BufReader::new(child.stdout.take().context("stdout is piped")?);
        let mut worker = Self { child, input, output };
        let address = worker.line()?;
        Ok((worker, address))
    }

    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        Ok(line.trim().to_owned())
    }
}

fn table() -> Result<()> {
    println!(
        "{:<24} {:>5} {:>10} {:>10} {:>8} {:>12} {:>16}",
        "operation", "ranks", "bytes", "median ms", "GB/s", "sockets ms", "sockets / shared"
    );
    for world in [2, 4] {
        let mut teams = [team(world, &[])?, team(world, &[SOCKETS])?];
        for (operation, bytes, repeats) in cases() {
            let mut seconds = [Vec::new(), Vec::new()];
            for _ in 0..9 {
                for (team, seconds) in teams.iter_mut().zip(&mut seconds) {
                    seconds.push(once(team, &format!("{operation} {bytes} {repeats}"))?);
                }
            }
            let [shared, sockets] = seconds.map(|mut seconds| {
                seconds.sort_by(f64::total_cmp);
                seconds[seconds.len() / 2]
            });
            let rate = bytes as f64 / shared / 1e9;
            println!(
                "{operation:<24} {world:>5} {bytes:>10} {:>10.3} {rate:>8.2} {:>12.3} {:>16.2}",
                shared * 1e3,
                sockets * 1e3,
                sockets / shared
            );
        }
        for Worker { mut child, input, .. } in teams.into_iter().flatten() {
            drop(input);
            child.wait()?;
        }
    }
    Ok(())
}

/// Ranks that have found each other.
fn team(world: usize, over: &[&str]) -> Result<Vec<Worker>> {
    let started = (0..world).map(|rank| Worker::start(rank, world, over)).collect::<Result<Vec<_>>>()?;
    let (mut workers, addresses): (Vec<_>, Vec<_>) = started.into_iter().unzip();
    for worker in &mut workers {
        writeln!(worker.input, "{}", addresses.join(" "))?;
    }
    Ok(workers)
}

/// Runs one command on all ranks; the slowest one's seconds.
fn once(workers: &mut [Worker], command: &str) -> Result<f64> {
    for worker in workers.iter_mut() {
        writeln!(worker.input, "{command}")?;
    }
    let mut slowest = 0.0f64;
    for worker in workers {
        slowest = slowest.max(worker.line()?.parse()?);
    }
    Ok(slowest)
}

fn cases() -> Vec<(&'static str, usize, u32)> {
    let mut cases = Vec::new();
    for mib in [1usize, 16, 128] {
        let repeats = if mib == 1 { 16 } else { 1 };
        for operation in ["all_reduce", "reduce_scatter", "all_gather", "broadcast"] {
            cases.push((operation, mib << 20, repeats));
        }
    }
    cases.extend([("all_reduce", 64, 100), ("barrier", 64, 100)]);
    cases
}
