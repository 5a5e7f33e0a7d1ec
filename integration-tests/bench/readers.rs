//! What floods of readers cost a run: steps a second, a worker's heartbeat, memory of the coordinator.
//!
//! ```text
//! cargo bench -p coxswain --bench readers [-- --seconds 5] [--repeats 3] [--only ledger]
//! ```
//!
//! The quickstart runs on loopback with two workers. In turns, for a few seconds each, it is left alone,
//! flooded by one token with the scope `read`, and kept from the processors by as many threads as the flood
//! has connections, which take as much time there as the flood's clients took and ask nobody: a machine that
//! others load meanwhile loads all three alike. The clients are on the processors that train, and readers of
//! another machine would not be, so the speed under the flood is compared with that beside the idle threads:
//! what is left is what the coordinator takes for the flood, and what of a step waits for it. What the
//! coordinator itself takes, in cores, stands beside it: that hardly depends on what else the machine does.
//!
//! A heartbeat is a call every 20 ms on a connection that only heartbeats use, and every tenth one is the
//! first call of a new connection, as of a worker that replaces another. Its time is measured from the call
//! to the answer in a thread of this process, so it includes what that thread waits for a processor beside
//! the flood's threads. As root it has a priority above theirs.
//!
//! Ends with 1 if a flood costs more than it may.

#[allow(dead_code, reason = "shared with the tests of real processes")]
#[path = "../processes/support/mod.rs"]
mod support;

use std::{
    fs,
    path::Path,
    process::{Command, ExitCode},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use coxswain_identity::{CertificateFiles, Credentials, Scope, Token, Tokens};
use coxswain_proto::v1::{HeartbeatRequest, WorkerPhase, coordinator_client::CoordinatorClient};
use nix::sys::resource::{UsageWho, getrusage};
use support::{
    CoxProcess,
    flood::{Flood, Question},
    processes::coordinator_of,
    tiny::Tiny,
};
use tonic::transport::Channel;

const FLOODS: [(Question, usize, usize); 21] = [
    (Question::Status, 100, 1_000),
    (Question::Status, 260, 1_000),
    (Question::Ledger, 100, 1_000),
    (Question::Ledger, 260, 1_000),
    (Question::History, 100, 1_000),
    (Question::History, 260, 1_000),
    (Question::Memory, 100, 1_000),
    (Question::Memory, 260, 1_000),
    (Question::Fresh, 100, 1_000),
    (Question::Fresh, 260, 1_000),
    (Question::Watch, 100, 1_000),
    (Question::Watch, 260, 1_000),
    (Question::Metrics, 100, 1_000),
    (Question::Metrics, 260, 1_000),
    (Question::Reflection, 100, 1_000),
    (Question::Reflection, 260, 1_000),
    (Question::Health, 100, 1_000),
    (Question::Health, 260, 1_000),
    (Question::HalfSent, 20, 1_000),
    (Question::HalfDescribed, 20, 1_000),
    (Question::Garbled, 100, 1_000),
];

/// Threads that idle, and clients that wait, wake up this often.
const TURN: Duration = Duration::from_millis(50);
/// Heartbeats of one connection.
const BEATS: usize = 10;
/// Ticks of a second, in `/proc`, on every Linux.
const TICKS: f64 = 100.0;
/// What a flood may cost: steps a second of those that the processors allow, a heartbeat's answer time, and
/// what the coordinator takes more of memory.
const LEAST_RATIO: f64 = 0.9;
const MOST_P99_MS: f64 = 250.0;
const MOST_MEMORY_MIB: f64 = 128.0;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().collect();
    let given = |flag: &str| args.iter().position(|arg| arg == flag).and_then(|at| args.get(at + 1));
    let number = |flag: &str, or: u64| given(flag).map_or(or, |text| text.parse().expect("a number"));
    let (window, repeats) = (Duration::from_secs(number("--seconds", 5)), number("--repeats", 3));
    let only = given("--only").map(|name| name.to_lowercase());
    let cores = thread::available_parallelism().map_or(1.0, |count| count.get() as f64);
    let bench = Bench::start(window);
    println!(
        "{:<20} {:>6} {:>7} {:>7} {:>6} {:>8} {:>15} {:>10} {:>9} {:>5}",
        "steps/s",
        "alone",
        "beside",
        "flooded",
        "ratio",
        "clients",
        "coordinator",
        "p99 beat",
        "memory",
        "lost"
    );
    let mut failed = Vec::new();
    for (question, connections, streams) in FLOODS {
        let name = format!("{question:?} {connections} x {streams}");
        if only.as_ref().is_some_and(|only| !name.to_lowercase().starts_with(only)) {
            continue;
        }
        let [mut alone, mut flooded, mut beside] = [(); 3].map(|()| Window::default());
        let before = bench.lost();
        for _ in 0..repeats {
            let quiet = bench.watch(None);
            let flood = Flood::start(&bench.endpoint, bench.read.secret(), question, connections, streams);
            let flooding = bench.watch(Some(Company::Flood(flood)));
            let taken = flooding.clients - quiet.clients;
            beside.add(bench.watch(Some(Company::Idlers(Idlers::start(connections, taken, window)))));
            alone.add(quiet);
            flooded.add(flooding);
        }
        // Idle threads wake up as often as clients, and may take a little more for it.
        let base = beside.speed() * (cores - flooded.clients()) / (cores - beside.clients());
        let ratio = flooded.speed() / base;
        let (p99, lost) = (flooded.p99(), bench.lost() - before);
        let memory = flooded.resident as f64 - alone.resident as f64;
        println!(
            "{name:<20} {:>6.2} {:>7.2} {:>7.2} {ratio:>6.3} {:>8.3} {:>6.3} to {:>5.3} {p99:>7.1} ms \
             {memory:>+5.0} MiB {lost:>5}",
            alone.speed(),
            beside.speed(),
            flooded.speed(),
            flooded.clients(),
            alone.coordinator(),
            flooded.coordinator(),
        );
        // NaN fails, too.
        let is_fast = ratio >= LEAST_RATIO;
        if !is_fast || p99 > MOST_P99_MS || memory > MOST_MEMORY_MIB || lost > 0 {
            failed.push(name);
        }
    }
    if failed.is_empty() {
        return ExitCode::SUCCESS;
    }
    println!(
        "not good enough (ratio {LEAST_RATIO}, {MOST_P99_MS} ms, {MOST_MEMORY_MIB} MiB, none lost): {}",
        failed.join(", ")
    );
    ExitCode::FAILURE
}

/// A run, and who looks at it.
struct Bench {
    tiny: Tiny,
    running: CoxProcess,
    endpoint: String,
    read: Token,
    window: Duration,
    beats: Arc<Mutex<Vec<f64>>>,
    over: Arc<AtomicBool>,
}

/// Who takes processors from the run for a while.
enum Company {
    Flood(Flood),
    Idlers(Idlers),
}

/// Threads that take processor time and do nothing with it.
struct Idlers {
    over: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

/// What was measured for a while, summed up.
#[derive(Default)]
struct Window {
    steps: usize,
    seconds: f64,
    /// Processor seconds of this process, and of the coordinator's.
    clients: f64,
    coordinator: f64,
    beats: Vec<f64>,
    /// The most, in MiB.
    resident: u64,
}

impl Bench {
    fn start(window: Duration) -> Self {
        let (tiny, endpoint) = (Tiny::new(1_000_000, 0), support::free_endpoint());
        let file = tiny.output().with_file_name("tokens");
        let [all, read] = [Scope::All, Scope::Read].map(|scope| Token::fresh(scope).expect("randomness"));
        [&all, &read].iter().for_each(|token| Tokens::add_to_file(&file, token).expect("a file"));
        let mut command =
            tiny.command(&["--rdzv-endpoint", &endpoint, "train.log_every=1", "train.global_batch=8"]);
        command.env("COX_TOKEN_FILE", &file);
        let mut running = CoxProcess::of(command);
        running.wait_for("20/1000000");
        let (beats, over) = (Arc::default(), Arc::new(AtomicBool::new(false)));
        let bench = Self { tiny, running, endpoint, read, window, beats, over };
        bench.beat(&all);
        bench
    }

    /// Says that a worker lives that nobody knows: on the way of all others, and of no consequence.
    fn beat(&self, token: &Token) {
        let credentials = Credentials::new(Some(Tokens::one(token.clone())), CertificateFiles::default());
        let (beats, over, address) =
            (self.beats.clone(), self.over.clone(), format!("http://{}", self.endpoint));
        thread::spawn(move || {
            let thread = nix::unistd::gettid().to_string();
            let raised = Command::new("renice").args(["-n", "-10", "-p", &thread]).output();
            if !raised.is_ok_and(|raised| raised.status.success()) {
                println!("heartbeats have no priority: their times include waits for a processor");
            }
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
            runtime.block_on(async {
                let there = Channel::from_shared(address).expect("an address");
                let connect = || {
                    let shown = credentials.for_scope(Scope::Worker);
                    CoordinatorClient::with_interceptor(there.connect_lazy(), shown)
                };
                let mut worker = connect();
                for beat in 1.. {
                    if over.load(Ordering::Relaxed) {
                        break;
                    }
                    if beat % BEATS == 0 {
                        worker = connect();
                    }
                    let request = HeartbeatRequest {
                        worker_id: u64::MAX,
                        incarnation: "nobody".into(),
                        phase: WorkerPhase::Loading.into(),
                        ..Default::default()
                    };
                    let asked = Instant::now();
                    worker.heartbeat(request).await.expect("every heartbeat is answered");
                    beats.lock().expect("nobody panics").push(asked.elapsed().as_secs_f64() * 1e3);
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
            });
        });
    }

    /// A window, in company or without.
    fn watch(&self, company: Option<Company>) -> Window {
        let coordinator = coordinator_of(self.running.pid()).expect("it lives");
        self.beats.lock().expect("nobody panics").clear();
        let (steps, began) = (self.steps(), Instant::now());
        let (clients, coordinators) = (processor(UsageWho::RUSAGE_SELF), processor_of(coordinator));
        let mut resident = 0;
        while began.elapsed() < self.window {
            resident = resident.max(memory(coordinator));
            thread::sleep(Duration::from_millis(50));
        }
        let window = Window {
            steps: self.steps() - steps,
            seconds: began.elapsed().as_secs_f64(),
            clients: processor(UsageWho::RUSAGE_SELF) - clients,
            coordinator: processor_of(coordinator) - coordinators,
            beats: std::mem::take(&mut self.beats.lock().expect("nobody panics")),
            resident,
        };
        match company {
            Some(Company::Flood(flood)) => drop(flood.end()),
            Some(Company::Idlers(idlers)) => idlers.end(),
            None => {}
        }
        // What they left behind is over.
        thread::sleep(Duration::from_secs(1));
        window
    }

    fn log(&self) -> String {
        fs::read_to_string(self.tiny.output().join("logs/coordinator.log")).unwrap_or_default()
    }

    fn steps(&self) -> usize {
        self.log().lines().filter(|line| line.contains("/1000000")).count()
    }

    fn lost(&self) -> usize {
        self.log().lines().filter(|line| line.contains("no sign of life")).count()
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
    }
}

impl Idlers {
    /// So many threads that take so much processor time in all, in as long as the bench looks.
    fn start(count: usize, seconds: f64, window: Duration) -> Self {
        let over = Arc::new(AtomicBool::new(false));
        let part = seconds / window.as_secs_f64() / count as f64;
        let idler = |_| {
            let over = over.clone();
            let idle = move || {
                let began = Instant::now();
                while !over.load(Ordering::Relaxed) {
                    thread::sleep(TURN);
                    let owed = began.elapsed().as_secs_f64() * part - processor(UsageWho::RUSAGE_THREAD);
                    let spinning = Instant::now();
                    while spinning.elapsed().as_secs_f64() < owed {}
                }
            };
            thread::Builder::new().stack_size(128 << 10).spawn(idle).expect("a thread")
        };
        let threads = (0..count).map(idler).collect();
        Self { over, threads }
    }

    fn end(self) {
        self.over.store(true, Ordering::Relaxed);
        self.threads.into_iter().for_each(|thread| thread.join().expect("it ends in order"));
    }
}

impl Window {
    fn add(&mut self, other: Self) {
        self.steps += other.steps;
        self.seconds += other.seconds;
        self.clients += other.clients;
        self.coordinator += other.coordinator;
        self.beats.extend(other.beats);
        self.resident = self.resident.max(other.resident);
    }

    fn speed(&self) -> f64 {
        self.steps as f64 / self.seconds
    }

    /// Cores that the flood's clients take.
    fn clients(&self) -> f64 {
        self.clients / self.seconds
    }

    /// Cores that the coordinator takes.
    fn coordinator(&self) -> f64 {
        self.coordinator / self.seconds
    }

    fn p99(&self) -> f64 {
        let mut beats = self.beats.clone();
        beats.sort_by(f64::total_cmp);
        beats
            .get((beats.len() * 99 / 100).min(beats.len().saturating_sub(1)))
            .copied()
            .unwrap_or(f64::INFINITY)
    }
}

/// Processor seconds of this process so far, or of the thread that asks.
fn processor(who: UsageWho) -> f64 {
    let usage = getrusage(who).expect("Linux");
    let seconds = |time: nix::sys::time::TimeVal| time.tv_sec() as f64 + time.tv_usec() as f64 / 1e6;
    seconds(usage.user_time()) + seconds(usage.system_time())
}

/// Processor seconds of another process so far.
fn processor_of(pid: i32) -> f64 {
    let stat = fs::read_to_string(Path::new("/proc").join(pid.to_string()).join("stat")).unwrap_or_default();
    // After its name, which may hold anything: fields 14 and 15 are user's and system's ticks.
    let fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace();
    let ticks: f64 = fields.skip(11).take(2).filter_map(|ticks| ticks.parse::<f64>().ok()).sum();
    ticks / TICKS
}

/// MiB that a process has resident.
fn memory(pid: i32) -> u64 {
    let status =
        fs::read_to_string(Path::new("/proc").join(pid.to_string()).join("status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok()).map_or(0, |kib| kib >> 10)
}
