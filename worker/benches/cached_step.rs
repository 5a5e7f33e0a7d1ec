//! Training steps from kept features next to the steps that compute them, each beside the speed-up that
//! arithmetic allows.
//!
//! ```text
//! cargo bench --bench cached_step -- --model DIR [--torch PYTHON] [--rounds 5] [--cached 3] [--batch 2]
//!     [--images 2] [--size 224] [--text 60] [--rank 16] [--expert-layers 4] [--expert-width 384]
//!     [--repeats 1,4] [--only NAME]
//! ```
//!
//! | case | LoRA | kept |
//! |---|---|---|
//! | `top-quarter` | the highest quarter of the decoder layers | the input of the first of them |
//! | `frozen` | none | the final hidden states |
//! | `vision` | all decoder layers | the image features |
//! | `periodic` | all decoder layers; at rest in cached steps | the final hidden states |
//!
//! Live and cached steps take turns in one process, and so do PyTorch's where `--torch` names a Python with
//! torch, transformers and peft (`integration-tests/bench/cached_step_torch.py`, in a process of its own that
//! waits in between). A step is everything from the batch in memory to the updated weights, AdamW included;
//! medians, and the fastest of each kind, which says more where others use the machine. `limit` is the ratio
//! of multiplications and additions in products, which leaves out everything else that both steps do;
//! `limit_beside_optimizer` is what it leaves if AdamW, which moves memory rather than multiplies, takes the
//! time that it took. Threads: `RAYON_NUM_THREADS`.

#[path = "support/prompts.rs"]
mod prompts;

use std::{
    io::{BufRead, BufReader, Write},
    path::Path,
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    time::Instant,
};

use anyhow::{Context, Result};
use burn::backend::Flex;
use coxswain_models::{
    families::shelf,
    vision_language::{ModelOutline, Tap},
};
use coxswain_nn::{
    kernels::{
        pool,
        sizes::{Account, Sizes},
    },
    params::{FlatGrads, Group, Trainables},
};
use coxswain_proto::{
    ids::{Rank, Step},
    run_spec::{Optimizer, RunSpec},
};
use coxswain_task::{CachedFeatures, FrozenWeights, StageClock, dry_run::PassCost};
use coxswain_tasks::vla_flow::{data::MicroBatch, policy::Policy};
use coxswain_worker::{
    collective::Solo,
    link::Phase,
    memory::{self, CountingAllocator, Meter},
    zero::{Rates, ShardedOptimizer, StepInput},
};
use nix::sys::{
    resource::{UsageWho, getrusage},
    time::TimeValLike,
};
use prompts::{DIMS, Flags, Prompts};
use serde_json::{Value, json};

/// As the `cox` binary has it.
#[global_allocator]
static ALLOCATOR: CountingAllocator<mimalloc::MiMalloc> = CountingAllocator(mimalloc::MiMalloc);

/// Steps of either kind that do not count: the optimizer makes its buffers, the allocator keeps what it is
/// given back.
const WARMUP: usize = 2;

fn main() -> Result<()> {
    let flags = Flags(std::env::args().collect());
    let model = flags.text("--model", "");
    if model.is_empty() {
        // `cargo bench` and `cargo test --benches` run every benchmark; without a checkpoint there is nothing
        // to time.
        println!("cached_step: no --model, skipped");
        return Ok(());
    }
    // As the trainer's thread does.
    pool::join();
    let config = shelf::<Sizes>().vision_language.of(Path::new(&model))?.outline(Path::new(&model))?;
    let prompts = Prompts::from_flags(&flags, &config)?;
    let (only, layers) = (flags.text("--only", ""), config.layers);
    let top: Vec<String> = (layers - layers / 4..layers).map(|layer| layer.to_string()).collect();
    let linears = r".*(q|k|v|o|gate|up|down)_proj";
    let cases = [
        ("top-quarter", Some(format!(r".*language_model\.layers\.({})\.{linears}", top.join("|"))), "exact"),
        ("frozen", None, "exact"),
        ("vision", Some(format!(r".*language_model{linears}")), "exact"),
        ("periodic", Some(format!(r".*language_model{linears}")), "periodic"),
    ];
    for repeats in flags.text("--repeats", "1,4").split(',') {
        let repeats = repeats.parse().context("--repeats wants numbers")?;
        for (name, targets, mode) in cases.iter().filter(|(name, ..)| only.is_empty() || only == *name) {
            let spec = spec(&flags, &model, repeats, (targets.as_deref(), mode))?;
            let mut torch = match (flags.text("--torch", "").as_str(), *mode) {
                ("", _) | (_, "exact") => None,
                (python, _) => Some(Torch::start(python, &flags, &model, repeats)?),
            };
            let mut bench = Bench::new(&spec, &config, prompts)?;
            let rounds = [flags.number("--rounds", 5)?, flags.number("--cached", 3)?];
            let hashing = Instant::now();
            bench.policy.weights_below(bench.tap)?.digest()?;
            let hashing_ms = round(hashing.elapsed().as_secs_f64() * 1e3);
            let report = bench.run(rounds, torch.as_mut())?;
            println!(
                "{}",
                json!({"case": name, "repeats": repeats, "weights_digest_ms": hashing_ms, "report": report})
            );
        }
    }
    Ok(())
}

fn spec(
    flags: &Flags,
    model: &str,
    repeats: usize,
    (targets, mode): (Option<&str>, &str),
) -> Result<RunSpec> {
    let (rank, width) = (flags.number("--rank", 16)?, flags.number("--expert-width", 384)?);
    let batch = flags.number("--batch", 2)?;
    Ok(serde_json::from_value(json!({
        "run": {"name": "bench", "output_dir": "unused"},
        "model": {"path": model},
        "lora": targets.map(|targets| json!({"rank": rank, "alpha": rank as f64, "targets": targets})),
        "expert": {"width": width, "heads": (width / 64).max(1), "layers": flags.number("--expert-layers", 4)?,
            "repeated_noise": repeats},
        "data": {"path": "unused", "cameras": ["unused"]},
        "train": {"steps": 1, "global_batch": batch, "micro_batch": batch},
        "cache": {"mode": mode},
    }))?)
}

/// A policy with its optimizer, and a batch with and without features.
struct Bench<'a> {
    policy: Policy<Flex>,
    trainables: Trainables<Flex>,
    grads: FlatGrads,
    optimizer: ShardedOptimizer,
    config: &'a ModelOutline,
    prompts: Prompts,
    features: CachedFeatures,
    tap: Tap,
    spec: &'a RunSpec,
    /// The group that rests in cached steps.
    resting: Option<Group>,
    /// Times of live steps and of cached ones.
    times: [Vec<Times>; 2],
    /// The most that one of them took beyond what was there before it, in bytes.
    peaks: [u64; 2],
    step: u64,
}

/// Milliseconds of a step: all of it, vision, language, expert, optimizer, and of all processors together.
type Times = [f64; 6];

impl<'a> Bench<'a> {
    fn new(spec: &'a RunSpec, config: &'a ModelOutline, prompts: Prompts) -> Result<Self> {
        let (policy, layout, values) = Policy::<Flex>::load(spec, shelf(), DIMS, &Default::default())?;
        let trainables = Trainables::new(layout.clone(), values, &Default::default());
        let tap = policy.tap().context("the case has a cache")?;
        let features = policy.features_below(&trainables, &prompts.batch(config, Step(0)))?;
        let resting = (tap == Tap::Final).then_some(Group::LORA);
        let grads = FlatGrads::new(layout.len());
        let optimizer = ShardedOptimizer::new(&layout, 1, Rank(0), &Optimizer::default());
        let (times, peaks, step) = ([vec![], vec![]], [0; 2], 0);
        Ok(Self {
            policy,
            trainables,
            grads,
            optimizer,
            config,
            prompts,
            features,
            tap,
            spec,
            resting,
            times,
            peaks,
            step,
        })
    }

    /// `rounds` of one live step and `cached` cached ones.
    fn run(&mut self, [rounds, cached]: [usize; 2], mut torch: Option<&mut Torch>) -> Result<Value> {
        let mut peer = [vec![], vec![]];
        for round in 0..WARMUP + rounds {
            let counts = round >= WARMUP;
            for cached in std::iter::once(false).chain(std::iter::repeat_n(true, cached)) {
                let batch = self.batch(cached);
                let times = self.step(&batch)?;
                let torch = torch.as_mut().map(|torch| torch.step(cached)).transpose()?;
                if counts {
                    self.times[usize::from(cached)].push(times);
                    peer[usize::from(cached)].extend(torch);
                }
            }
        }
        let [live, cached] = self.times.each_ref().map(|times| median(times.iter().map(|times| times[0])));
        let [least_live, least_cached] = self
            .times
            .each_ref()
            .map(|times| times.iter().map(|times| times[0]).fold(f64::INFINITY, f64::min));
        // The speed-up that arithmetic allows.
        let limit = self.flops(false)? / self.flops(true)?;
        let (speedup, fastest) = (live / cached, least_live / least_cached);
        let optimizer = median(self.times[1].iter().map(|times| times[4]));
        let beside_optimizer = live / ((live - optimizer) / limit + optimizer);
        let parts = self.times.each_ref().map(|times| {
            let part = |part: usize| round(median(times.iter().map(|times| times[part])));
            json!({"vision": part(1), "language": part(2), "expert": part(3), "optimizer": part(4), "processors": part(5)})
        });
        let mut report = json!({
            "tap": self.tap.to_string(), "live_ms": round(live), "cached_ms": round(cached), "speedup": round(speedup),
            "limit": round(limit), "share_of_limit": (100.0 * speedup / limit).round() / 100.0,
            "limit_beside_optimizer": round(beside_optimizer),
            "share_beside_optimizer": (100.0 * speedup / beside_optimizer).round() / 100.0,
            "fastest": {"live_ms": round(least_live), "cached_ms": round(least_cached), "speedup": round(fastest),
                "share_of_limit": (100.0 * fastest / limit).round() / 100.0},
            "live_parts_ms": parts[0], "cached_parts_ms": parts[1],
            "live_activations_mib": self.peaks[0] >> 20, "cached_activations_mib": self.peaks[1] >> 20,
        });
        if torch.is_some() {
            let least = |times: &[f64]| round(times.iter().copied().fold(f64::INFINITY, f64::min));
            let fastest = peer.each_ref().map(|times| least(times));
            let [live, cached_peer] = peer.map(|times| median(times.into_iter()));
            report["torch"] = json!({
                "live_ms": round(live), "cached_ms": round(cached_peer), "speedup": round(live / cached_peer),
                "fastest_ms": fastest,
                "cached_ours_over_theirs": (100.0 * cached / cached_peer).round() / 100.0,
            });
        }
        Ok(report)
    }

    fn batch(&mut self, cached: bool) -> MicroBatch {
        let step = Step(self.step);
        self.step += 1;
        if !cached {
            return self.prompts.batch(self.config, step);
        }
        let features = Some(self.features.clone());
        MicroBatch { features, ..self.prompts.without_pixels(self.config, step) }
    }

    fn step(&mut self, batch: &MicroBatch) -> Result<Times> {
        let rates = Rates::from([("lora", 1e-4), ("expert", 1e-4), ("sensor", 1e-4)]);
        let resting = self.resting.filter(|_| batch.features.is_some());
        let (mut meter, before) = (Meter::new(Phase::Forward, None), memory::in_use());
        let (begin, busy) = (Instant::now(), processor_ms()?);
        self.grads.zero();
        let mut clock = StageClock::default();
        let micro = self.policy.forward_backward(&self.trainables, batch, &mut self.grads, &mut clock)?;
        let updating = Instant::now();
        let peak = &mut self.peaks[usize::from(batch.features.is_some())];
        *peak = (*peak).max(meter.take_step_peak().0 - before);
        let mut weights = self.trainables.take();
        let input = StepInput { scale: 1.0 / micro.valid, rates, resting };
        let grads = self.grads.values_but(resting, self.trainables.layout());
        self.optimizer.step(grads, &mut weights, &input, &mut Solo::default())?;
        self.trainables.set(weights);
        let (end, times) = (Instant::now(), clock.into_times());
        let parts =
            [end - begin, times.of("vision"), times.of("language"), times.of("expert"), end - updating];
        let [all, vision, language, expert, optimizer] = parts.map(|part| part.as_secs_f64() * 1e3);
        Ok([all, vision, language, expert, optimizer, processor_ms()? - busy])
    }

    /// Multiplications and additions of a live step or a cached one.
    fn flops(&mut self, cached: bool) -> Result<f64> {
        let account = Account::open();
        let (policy, layout, values) = Policy::<Sizes>::load(self.spec, shelf(), DIMS, account.device())?;
        let trainables = Trainables::new(layout, values, account.device());
        let batch = self.batch(cached);
        let pass = PassCost::of(&account, |grads, clock| {
            policy.forward_backward(&trainables, &batch, grads, clock).map(drop)
        });
        Ok(pass?.flops.total() as f64)
    }
}

/// PyTorch's steps, in a process that runs one at a time.
struct Torch {
    child: Child,
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Torch {
    fn start(python: &str, flags: &Flags, model: &str, repeats: usize) -> Result<Self> {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../integration-tests/bench/cached_step_torch.py");
        let numbers = [
            ("--batch", 2),
            ("--images", 2),
            ("--size", 224),
            ("--text", 60),
            ("--rank", 16),
            ("--expert-layers", 4),
            ("--expert-width", 384),
        ];
        let mut command = Command::new(python);
        command.arg(script).arg(model).args(["--repeats", &repeats.to_string()]);
        command.args(["--threads", &rayon::current_num_threads().to_string()]);
        for (name, default) in numbers {
            command.args([name, &flags.number(name, default)?.to_string()]);
        }
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().context(script)?;
        let (orders, answers) = (child.stdin.take(), child.stdout.take());
        let answers = BufReader::new(answers.context("the child's output is a pipe")?);
        Ok(Self { child, orders: orders.context("the child's input is a pipe")?, answers })
    }

    /// One step; milliseconds.
    fn step(&mut self, cached: bool) -> Result<f64> {
        writeln!(self.orders, "{}", if cached { "cached" } else { "live" })?;
        let mut line = String::new();
        self.answers.read_line(&mut line)?;
        line.trim().parse().with_context(|| format!("PyTorch's process answered `{line}`"))
    }
}

impl Drop for Torch {
    fn drop(&mut self) {
        // It may have ended already, with an error of its own on the terminal.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Processor time of this process so far, in milliseconds.
fn processor_ms() -> Result<f64> {
    let usage = getrusage(UsageWho::RUSAGE_SELF)?;
    let times = [usage.user_time(), usage.system_time()];
    Ok(times.iter().map(|time| time.num_microseconds() as f64 / 1e3).sum())
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_unstable_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

fn round(value: f64) -> f64 {
    (value * 10.0).round() / 10.0
}
