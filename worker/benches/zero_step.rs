//! One step of the partitioned optimizer on the loopback interface, one process per rank: reduce-scatter,
//! norm, AdamW, all-gather.
//!
//! ```text
//! cargo bench --bench zero_step -- --world 2 --elements 100000000 --steps 5 [--replica 1]
//! python integration-tests/bench/zero_step.py        the same next to DDP + AdamW and DeepSpeed ZeRO-2
//! ```
//!
//! With `--replica D` every rank also keeps what the loss of the rank D before it would need, as training on
//! nodes of D ranks does by default. Each rank computes with `RAYON_NUM_THREADS` threads, one if that is not
//! set. Prints JSON: milliseconds of each step on the slowest rank, their split on rank 0, and the peak
//! resident set of the largest rank.

use std::{
    io::{BufRead, BufReader, Write},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use coxswain_nn::params::{Group, Init, TrainableLayout};
use coxswain_proto::{
    ids::{Generation, Rank},
    run_spec::Optimizer,
};
use coxswain_worker::{
    collective::{Collective, Membership, Ring, RingAbort, RingListener},
    zero::{Rates, ReplicatedOptimizer, StepInput},
};

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().collect();
    let value = |flag: &str, default: &str| {
        let at = args.iter().position(|arg| arg == flag).and_then(|at| args.get(at + 1));
        at.map_or(default, String::as_str).to_owned()
    };
    let (world, elements) = (value("--world", "2"), value("--elements", "20000000"));
    let given = |flag: &str| args.iter().any(|arg| arg == flag);
    let bench = Bench {
        world: world.parse()?,
        elements: elements.parse()?,
        steps: value("--steps", "5").parse()?,
        replica: given("--replica").then(|| value("--replica", "1").parse()).transpose()?,
    };
    match given("--rank") {
        true => bench.be_a_rank(value("--rank", "0").parse()?),
        false => bench.lead(),
    }
}

struct Bench {
    world: usize,
    elements: usize,
    steps: usize,
    replica: Option<u32>,
}

impl Bench {
    /// Starts all ranks and puts their answers together.
    fn lead(&self) -> Result<()> {
        let mut ranks = Vec::new();
        for rank in 0..self.world {
            let mut command = Command::new(std::env::current_exe()?);
            command.args(["--rank", &rank.to_string(), "--world", &self.world.to_string()]);
            command.args(["--elements", &self.elements.to_string(), "--steps", &self.steps.to_string()]);
            if let Some(distance) = self.replica {
                command.args(["--replica", &distance.to_string()]);
            }
            if std::env::var_os("RAYON_NUM_THREADS").is_none() {
                command.env("RAYON_NUM_THREADS", "1");
            }
            let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
            let mut output = BufReader::new(child.stdout.take().context("stdout is piped")?).lines();
            let address = output.next().context("no address")??;
            ranks.push((child, output, address));
        }
        let addresses: Vec<String> = ranks.iter().map(|(_, _, address)| address.clone()).collect();
        for (child, _, _) in &mut ranks {
            writeln!(input(child)?, "{}", addresses.join(" "))?;
        }
        let mut slowest = vec![0.0f64; self.steps];
        let (mut peak, mut split) = (0u64, String::new());
        for (child, mut output, _) in ranks {
            let (times, rss) = (output.next().context("no times")??, output.next().context("no peak")??);
            let parts = output.next().context("no split")??;
            for (slowest, time) in slowest.iter_mut().zip(times.split_whitespace()) {
                *slowest = slowest.max(time.parse()?);
            }
            peak = peak.max(rss.parse()?);
            split = if split.is_empty() { parts } else { split };
            wait(child)?;
        }
        println!(r#"{{"step_ms": {slowest:.1?}, {split}, "peak_rss_mb": {:.1}}}"#, peak as f64 / 1024.0);
        Ok(())
    }

    fn be_a_rank(&self, rank: u32) -> Result<()> {
        let listener = RingListener::bind("127.0.0.1:0")?;
        println!("{}", listener.address());
        let line = std::io::stdin().lines().next().context("no addresses")??;
        let peers: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        let membership = Membership::among("bench", Generation(1), Rank(rank), &peers);
        let deadline = Instant::now() + Duration::from_secs(30);
        let mut ring = Ring::connect(&listener, &membership, deadline, &RingAbort::new())?;
        let layout = layout(self.elements);
        let (mut weights, mut grads) = (vec![0.1f32; layout.len()], vec![0.0f32; layout.len()]);
        let settings = Optimizer::default();
        let mut optimizer =
            ReplicatedOptimizer::new(&layout, self.world, Rank(rank), &settings, self.replica);
        optimizer.begin(0, 0, &weights);
        let input = StepInput {
            scale: 0.5,
            rates: Rates::from([("lora", 1e-4), ("expert", 1e-4), ("sensor", 1e-4)]),
            resting: None,
        };
        let (mut times, mut communication, mut compute) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..self.steps {
            grads.fill(0.01);
            ring.barrier()?;
            let begin = Instant::now();
            let outcome = optimizer.step(&mut grads, &mut weights, &input, &mut ring)?;
            times.push(format!("{:.3}", begin.elapsed().as_secs_f64() * 1e3));
            communication.push(outcome.communication.as_secs_f64() * 1e3);
            compute.push(outcome.compute.as_secs_f64() * 1e3);
        }
        println!("{}", times.join(" "));
        println!("{}", peak_rss_kib()?);
        println!(r#""communication_ms": {communication:.1?}, "compute_ms": {compute:.1?}"#);
        Ok(())
    }
}

fn input(child: &mut Child) -> Result<&mut std::process::ChildStdin> {
    child.stdin.as_mut().context("stdin is piped")
}

fn wait(mut child: Child) -> Result<()> {
    anyhow::ensure!(child.wait()?.success(), "a rank failed");
    Ok(())
}

/// Matrices of four million elements, each with a bias: decay flags alternate as they do in a model.
fn layout(elements: usize) -> TrainableLayout {
    let mut layout = TrainableLayout::default();
    let mut number = 0;
    while layout.len() < elements {
        let left = elements - layout.len();
        let rows = (left.min(4 << 20) / 2048).max(1);
        layout.add(format!("expert.{number}.weight"), &[rows, 2048], Group("expert"), true, Init::Zeros);
        layout.add(format!("expert.{number}.bias"), &[rows], Group("expert"), false, Init::Zeros);
        number += 1;
    }
    layout
}

fn peak_rss_kib() -> Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).context("no VmHWM")?;
    Ok(line.split_whitespace().nth(1).context("no number")?.parse()?)
}
