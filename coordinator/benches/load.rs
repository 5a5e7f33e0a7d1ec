//! How many workers one coordinator serves: thousands of lines, heartbeats and step reports every second, on
//! loopback.
//!
//! ```text
//! cargo bench -p coxswain-coordinator --bench load -- --workers 10000 --seconds 20 [--connections 64]
//! ```
//!
//! The coordinator runs in a process of its own on one thread, with a journal on disk as in a real run; this
//! process plays the workers, which share connections (each has its own stream and its own calls). Prints the
//! time from call to answer, the coordinator's processor time, and its resident memory at the beginning and
//! at the end.

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
    v1::{self, coordinator_client::CoordinatorClient, directive::Kind},
};
use tokio::{net::TcpListener, sync::Barrier, time::Instant as TokioInstant};
use tonic::{Status, transport::Channel};

type Failure = Box<dyn std::error::Error + Send + Sync>;

const SAMPLES: u64 = 10_000_000;

#[derive(Clone, Copy)]
struct Load {
    workers: u32,
    connections: u32,
    seconds: u64,
}

fn main() -> Result<(), Failure> {
    let args: Vec<String> = std::env::args().collect();
    let number = |flag: &str, default: u64| {
        let at = args.iter().position(|arg| arg == flag).and_then(|at| args.get(at + 1));
        at.map_or(Ok(default), |value| value.parse())
    };
    let load = Load {
        workers: number("--workers", 1000)? as u32,
        connections: number("--connections", 64)? as u32,
        seconds: number("--seconds", 10)?,
    };
    match args.iter().any(|arg| arg == "--serve") {
        true => serve(load),
        false => drive(load),
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
    let mut options = Options::new(spec(load, &output)?, World::fixed(1, load.workers));
    options.state_dir = Some(directory.path().join("state"));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        println!("{}", listener.local_addr()?);
        coxswain_coordinator::serve(listener, options, std::future::pending()).await?;
        Ok(())
    })
}

fn drive(load: Load) -> Result<(), Failure> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["--serve", "--workers", &load.workers.to_string()]);
    let mut server = command.stdout(Stdio::piped()).spawn()?;
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

async fn measure(load: Load, address: &str, server: &Child) -> Result<(), Failure> {
    let plan = Plan::new(&spec(load, "none")?.train, SAMPLES)?;
    let (times, ready) = (Arc::new(Times::default()), Arc::new(Barrier::new(load.workers as usize + 1)));
    let mut channels = Vec::new();
    for _ in 0..load.connections {
        channels.push(Channel::from_shared(format!("http://{address}"))?.connect().await?);
    }
    let begin = Instant::now();
    let mut workers = tokio::task::JoinSet::new();
    for rank in 0..load.workers {
        let client = CoordinatorClient::new(channels[(rank % load.connections) as usize].clone());
        let worker = Worker { client, rank, load, plan, times: times.clone(), ready: ready.clone() };
        workers.spawn(worker.run());
    }
    tokio::select! {
        _ = ready.wait() => {}
        Some(ended) = workers.join_next() => return Err(format!("a worker ended early: {ended:?}").into()),
    }
    println!("{} workers are training after {:.1} s", load.workers, begin.elapsed().as_secs_f64());
    times.begun.store(true, Ordering::Relaxed);
    let before = usage(server)?;
    let measured = Instant::now();
    while let Some(ended) = workers.join_next().await {
        ended??;
    }
    let (after, seconds) = (usage(server)?, measured.elapsed().as_secs_f64());
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
    Ok(())
}

/// One worker that trains nothing.
#[derive(Clone)]
struct Worker {
    client: CoordinatorClient<Channel>,
    rank: u32,
    load: Load,
    plan: Plan,
    times: Arc<Times>,
    ready: Arc<Barrier>,
}

impl Worker {
    async fn run(mut self) -> Result<(), Status> {
        let incarnation = format!("life-{}", self.rank);
        let worker_id = self.client.register(self.claim(&incarnation)).await?.into_inner().worker_id;
        let follow = v1::FollowRequest { worker_id, incarnation: incarnation.clone() };
        let mut line = self.client.follow(follow).await?.into_inner();
        // A worker lives from its registration on, also while ten thousand others are still coming.
        let beating = tokio::spawn(self.clone().beat(worker_id, incarnation.clone()));
        let ready = v1::ReadyRequest { worker_id, incarnation: incarnation.clone(), ..Default::default() };
        self.client.ready(ready).await?;
        let generation = loop {
            let told = line.message().await?.and_then(|directive| directive.kind);
            if let Some(Kind::Assignment(assignment)) = told {
                break assignment.generation;
            }
        };
        let start = v1::ReportStartRequest {
            worker_id,
            generation,
            source: v1::StateSource::Fresh.into(),
            ..Default::default()
        };
        self.client.report_start(start).await?;
        while !matches!(line.message().await?.and_then(|directive| directive.kind), Some(Kind::Lease(_))) {}
        self.ready.wait().await;
        // The line is read to the end of the measurement, as a session does.
        let reading = tokio::spawn(async move { while let Ok(Some(_)) = line.message().await {} });
        let share = f64::from(self.rank) / f64::from(self.load.workers);
        let begin = TokioInstant::now() + Duration::from_secs_f64(share);
        for second in 0..self.load.seconds {
            tokio::time::sleep_until(begin + Duration::from_secs(second)).await;
            let steps = vec![self.report(generation, second)];
            let asked = Instant::now();
            self.client.report_steps(v1::ReportStepsRequest { worker_id, steps }).await?;
            self.times.note(&self.times.reports, asked);
        }
        reading.abort();
        beating.abort();
        Ok(())
    }

    /// "I live", every second, for ever.
    async fn beat(mut self, worker_id: u64, incarnation: String) -> Result<(), Status> {
        let mut clock = tokio::time::interval(Duration::from_secs(1));
        loop {
            clock.tick().await;
            let beat = v1::HeartbeatRequest {
                worker_id,
                incarnation: incarnation.clone(),
                generation: 1,
                phase: v1::WorkerPhase::Communication.into(),
                ..Default::default()
            };
            let asked = Instant::now();
            self.client.heartbeat(beat).await?;
            self.times.note(&self.times.heartbeats, asked);
        }
    }

    fn claim(&self, incarnation: &str) -> v1::RegisterRequest {
        v1::RegisterRequest {
            version: VERSION.into(),
            incarnation: incarnation.into(),
            host: "node".into(),
            pid: self.rank + 1,
            rank: self.rank,
            local_rank: self.rank,
            data_address: format!("127.0.0.1:{}", self.rank % 60_000),
            device: "cpu".into(),
            training_samples: SAMPLES,
            dataset_fingerprint: "f00d".into(),
            ..Default::default()
        }
    }

    fn report(&self, generation: u64, step: u64) -> v1::StepReport {
        let batch = self.plan.batch(Step(step));
        let positions = batch.of_rank(Rank(self.rank), self.load.workers);
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

/// What a process has used: processor seconds, and MiB resident now.
struct Usage {
    cpu: f64,
    resident: f64,
}

fn usage(process: &Child) -> Result<Usage, Failure> {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", process.id()))?;
    let fields: Vec<&str> = stat.rsplit(") ").next().ok_or("no stat")?.split_whitespace().collect();
    // Fields 14 and 15 of proc(5), in ticks of a hundredth of a second.
    let ticks = fields[11].parse::<f64>()? + fields[12].parse::<f64>()?;
    let status = std::fs::read_to_string(format!("/proc/{}/status", process.id()))?;
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).ok_or("no VmRSS")?;
    let kib: f64 = line.split_whitespace().nth(1).ok_or("no number")?.parse()?;
    Ok(Usage { cpu: ticks / 100.0, resident: kib / 1024.0 })
}
