//! How many workers one coordinator serves: thousands of lines, heartbeats and step reports every second, on
//! loopback.
//!
//! ```text
//! cargo bench -p coxswain-coordinator --bench load -- --workers 10000 --seconds 20 [--connections 313]
//! cargo bench -p coxswain-coordinator --bench load -- --workers 100000 --node 8 --seconds 30 --core 0
//! ```
//!
//! The coordinator runs in a process of its own on one thread, with a journal on disk as in a real run; this
//! process plays the workers, which share connections (each has its own stream and its own calls). With
//! `--node N` it plays launchers instead, each with one connection and one stream for N workers, whose
//! heartbeats go with their steps. Memory is allocated as in `cox`. With
//! `--core` the coordinator has that core, and this process all others. Prints the time from call to answer,
//! the coordinator's processor time, and its resident memory at the beginning and at the end.

mod direct;
mod nodes;
mod process;

use std::{
    io::{BufRead, BufReader},
    process::{Child, Command, Stdio},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use coxswain_coordinator::{Options, World};
use coxswain_proto::{
    VERSION,
    ids::{Rank, Step},
    plan::Plan,
    report::Metric,
    run_spec::RunSpec,
    v1,
};
use mimalloc::MiMalloc;
use tokio::{net::TcpListener, sync::Barrier, task::JoinSet};
use tonic::Status;

use self::process::{pin, usage};

#[global_allocator]
static ALLOCATOR: MiMalloc = MiMalloc;

type Failure = Box<dyn std::error::Error + Send + Sync>;

const SAMPLES: u64 = 10_000_000;

#[derive(Clone, Copy)]
struct Load {
    workers: u32,
    connections: u32,
    /// Workers of a node; 0: each speaks for itself.
    node: u32,
    seconds: u64,
}

fn main() -> Result<(), Failure> {
    let args: Vec<String> = std::env::args().collect();
    let given = |flag: &str| args.iter().position(|arg| arg == flag).and_then(|at| args.get(at + 1));
    let number = |flag: &str, default: u64| given(flag).map_or(Ok(default), |value| value.parse());
    let load = Load {
        workers: number("--workers", 1000)? as u32,
        connections: number("--connections", number("--workers", 1000)?.div_ceil(32))? as u32,
        node: number("--node", 0)? as u32,
        seconds: number("--seconds", 10)?,
    };
    match args.iter().any(|arg| arg == "--serve") {
        true => serve(load),
        false => drive(load, given("--core").map(|core| core.parse()).transpose()?),
    }
}

fn spec(load: Load, output_dir: &str) -> Result<RunSpec, Failure> {
    Ok(serde_json::from_value(serde_json::json!({
        "run": {"name": "load", "output_dir": output_dir, "seed": 7},
        "model": {"path": "none"},
        "data": {"path": "none", "cameras": ["front"]},
        "train": {"steps": 1_000_000, "global_batch": load.workers, "micro_batch": 1, "log_every": 1000},
    }))?)
}

/// The coordinator: prints its port, serves until it is killed.
fn serve(load: Load) -> Result<(), Failure> {
    let directory = tempfile::tempdir()?;
    let output = directory.path().display().to_string();
    let world = match load.node {
        0 => World::fixed(1, load.workers),
        node => World::fixed(load.workers / node, node),
    };
    let mut options = Options::new(spec(load, &output)?, world);
    options.state_dir = Some(directory.path().join("state"));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        println!("{}", listener.local_addr()?);
        coxswain_coordinator::serve(listener, options, std::future::pending()).await?;
        Ok(())
    })
}

fn drive(load: Load, core: Option<usize>) -> Result<(), Failure> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["--serve", "--workers", &load.workers.to_string(), "--node", &load.node.to_string()]);
    let mut server = command.stdout(Stdio::piped()).spawn()?;
    if let Some(core) = core {
        pin(server.id(), |other| other == core)?;
        pin(std::process::id(), |other| other != core)?;
    }
    let mut line = String::new();
    BufReader::new(server.stdout.take().ok_or("stdout is piped")?).read_line(&mut line)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let result = runtime.block_on(measure(load, line.trim(), &server));
    server.kill()?;
    server.wait()?;
    result
}

/// Milliseconds from call to answer, of everyone.
#[derive(Default)]
struct Times {
    heartbeats: Mutex<Vec<f64>>,
    reports: Mutex<Vec<f64>>,
    /// Set once everyone is training; nothing is noted before.
    begun: AtomicBool,
}

/// What all that are played have in common.
#[derive(Clone)]
struct Stage {
    load: Load,
    plan: Plan,
    times: Arc<Times>,
    ready: Arc<Barrier>,
    /// Barrier at which all that are played meet when they have ended.
    done: Arc<Barrier>,
}

async fn measure(load: Load, address: &str, server: &Child) -> Result<(), Failure> {
    let plan = Plan::new(&spec(load, "none")?.train, SAMPLES)?;
    let parties = load.workers.checked_div(load.node).unwrap_or(load.workers);
    let ready = Arc::new(Barrier::new(parties as usize + 1));
    let done = Arc::new(Barrier::new(parties as usize));
    let stage = Stage { load, plan, times: Arc::default(), ready, done };
    let (times, ready, begin) = (stage.times.clone(), stage.ready.clone(), Instant::now());
    let mut played: JoinSet<Result<(), Status>> = match load.node {
        0 => direct::play(stage, address).await?,
        _ => nodes::play(stage, address),
    };
    tokio::select! {
        _ = ready.wait() => {}
        Some(ended) = played.join_next() => return Err(format!("a worker ended early: {ended:?}").into()),
    }
    println!("{} workers are training after {:.1} s", load.workers, begin.elapsed().as_secs_f64());
    times.begun.store(true, Ordering::Relaxed);
    let (before, own) = (usage(server.id())?, usage(std::process::id())?);
    let measured = Instant::now();
    while let Some(ended) = played.join_next().await {
        ended??;
    }
    let (after, seconds) = (usage(server.id())?, measured.elapsed().as_secs_f64());
    for (what, values) in [("heartbeat", &times.heartbeats), ("step report", &times.reports)] {
        let mut values = values.lock().map_err(|_| "a worker panicked")?.clone();
        values.sort_by(f64::total_cmp);
        let at = |share: f64| values[((values.len() - 1) as f64 * share) as usize];
        println!(
            "{what:<12} {:>8} calls   p50 {:>7.2} ms   p99 {:>7.2} ms   worst {:>7.2} ms",
            values.len(),
            at(0.5),
            at(0.99),
            at(1.0)
        );
    }
    println!(
        "coordinator  {:.2} processor seconds a second, {:.1} MiB resident at the beginning, {:.1} MiB at the end",
        (after.cpu - before.cpu) / seconds,
        before.resident,
        after.resident
    );
    let own = (usage(std::process::id())?.cpu - own.cpu) / seconds;
    println!("this process {own:.2} processor seconds a second");
    Ok(())
}

impl Stage {
    fn claim(&self, rank: u32, incarnation: &str) -> v1::RegisterRequest {
        let node = if self.load.node == 0 { self.load.workers } else { self.load.node };
        v1::RegisterRequest {
            version: VERSION.into(),
            incarnation: incarnation.into(),
            host: "node".into(),
            pid: rank + 1,
            rank,
            local_rank: rank % node,
            node_rank: rank / node,
            data_address: format!("127.0.0.1:{}", rank % 60_000),
            device: "cpu".into(),
            training_samples: SAMPLES,
            dataset_fingerprint: "f00d".into(),
            ..Default::default()
        }
    }

    fn report(&self, rank: u32, generation: u64, step: u64) -> v1::StepReport {
        let batch = self.plan.batch(Step(step));
        let positions = batch.of_rank(Rank(rank), self.load.workers);
        let stage = |name: &str| (&Metric::stage_time(name, Duration::from_millis(300))).into();
        v1::StepReport {
            generation,
            step,
            epoch: batch.epoch,
            samples: vec![v1::SampleRange { begin: positions.start, end: positions.end }],
            loss_sum: 1.0,
            valid_count: 8.0,
            grad_norm: 1.0,
            times: Some(v1::StepTimes { total_ms: 1000.0, ..Default::default() }),
            metrics: ["vision", "language", "expert"].map(stage).into(),
            tokens: 10,
            ..Default::default()
        }
    }
}

impl Times {
    fn note(&self, times: &Mutex<Vec<f64>>, asked: Instant) {
        if self.begun.load(Ordering::Relaxed)
            && let Ok(mut times) = times.lock()
        {
            times.push(asked.elapsed().as_secs_f64() * 1e3);
        }
    }
}
