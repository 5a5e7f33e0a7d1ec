//! One training step of the whole policy: forward, backward, clipping and AdamW, on random data of fixed
//! sizes.
//!
//! ```text
//! cargo bench --bench vla_step -- --model DIR [--batch 2] [--images 2] [--size 224] [--text 60] [--rank 16]
//!     [--targets all|attn] [--recompute none|selective|full|N] [--repeats 1]
//!     [--expert-layers 16] [--expert-width 768]
//!     [--weights float32|bfloat16] [--activations float32|bfloat16]
//!     [--offload none|layers] [--steps 8] [--warmup 2]
//! python integration-tests/bench/vla_step_vs_torch.py        the same next to PyTorch and PEFT
//! ```
//!
//! `DIR` is any Qwen2.5-VL checkpoint in Hugging Face format; `RAYON_NUM_THREADS` sets the threads, and
//! `MIMALLOC_PURGE_DELAY=-1` keeps freed memory as the launcher has workers do. Prints JSON: milliseconds of
//! each step, where they went, sizes, the peak resident set, and the most bytes that the allocator had handed
//! out: weights that are used where they lie in their files are in the first and not in the second.

#[path = "support/prompts.rs"]
mod prompts;

use coxswain_tasks::vla_flow::config::VlaSpec;
use std::{path::Path, time::Instant};

use anyhow::{Context, Result, bail};
use burn::backend::Flex;
use coxswain_models::families::shelf;
use coxswain_nn::kernels::sizes::Sizes;
use coxswain_nn::{
    kernels::pool,
    params::{FlatGrads, Trainables},
};
use coxswain_proto::{
    ids::{Rank, Step},
    run_spec::{Optimizer, RunSpec},
};
use coxswain_task::StageClock;
use coxswain_tasks::vla_flow::policy::Policy;
use coxswain_worker::{
    collective::Solo,
    link::Phase,
    memory::{CountingAllocator, Meter},
    zero::{Rates, ShardedOptimizer, StepInput},
};
use prompts::{DIMS, Flags, Prompts};
use serde_json::{Value, json};

/// As the `cox` binary has it.
#[global_allocator]
static ALLOCATOR: CountingAllocator<mimalloc::MiMalloc> = CountingAllocator(mimalloc::MiMalloc);

fn main() -> Result<()> {
    let flags = Flags(std::env::args().collect());
    let model = flags.text("--model", "");
    if model.is_empty() {
        // `cargo bench` and `cargo test --benches` run every benchmark; without a checkpoint there is nothing
        // to time.
        println!("vla_step: no --model, skipped");
        return Ok(());
    }
    // As the trainer's thread does.
    pool::join();
    let spec = spec(&flags, &model)?;
    let (policy, layout, values) = Policy::<Flex>::load(&spec, shelf(), DIMS, &Default::default())?;
    let mut trainables = Trainables::new(layout.clone(), values, &Default::default());
    let mut grads = FlatGrads::new(layout.len());
    let mut optimizer = ShardedOptimizer::new(&layout, 1, Rank(0), &Optimizer::default());
    let rates = Rates::from([("lora", 1e-4), ("expert", 1e-4), ("sensor", 1e-4)]);
    let (warmup, steps) = (flags.number("--warmup", 2)?, flags.number("--steps", 8)?);
    let config = shelf::<Sizes>().vision_language.of(Path::new(&model))?.outline(Path::new(&model))?;
    let prompts = Prompts::from_flags(&flags, &config)?;

    let mut meter = Meter::new(Phase::Forward, None);
    let (mut step_ms, mut parts_ms, mut loss) = (Vec::new(), Vec::new(), 0.0);
    let mut tokens = 0;
    for step in 0..warmup + steps {
        let batch = prompts.batch(&config, Step(step as u64));
        tokens = batch.seq_len;
        let begin = Instant::now();
        grads.zero();
        let mut clock = StageClock::default();
        let micro = policy.forward_backward(&trainables, &batch, &mut grads, &mut clock)?;
        let updating = Instant::now();
        let mut weights = trainables.take();
        let input = StepInput { scale: 1.0 / micro.valid, rates: rates.clone(), resting: None };
        optimizer.step(grads.values_mut(), &mut weights, &input, &mut Solo::default())?;
        trainables.set(weights);
        let (end, times) = (Instant::now(), clock.into_times());
        loss = micro.loss_sum / micro.valid;
        if step >= warmup {
            step_ms.push(round((end - begin).as_secs_f64() * 1e3));
            let parts = [times.of("vision"), times.of("language"), times.of("expert"), end - updating];
            parts_ms.push(parts.map(|part| round(part.as_secs_f64() * 1e3)));
        }
    }
    let frozen = policy.trainable_report(&layout, spec.vla().model.weights_dtype);
    let frozen: usize = frozen.iter().filter(|row| !row.trains).map(|row| row.parameters).sum();
    let report = json!({
        "step_ms": step_ms, "vision_language_expert_optimizer_ms": parts_ms, "loss": loss, "tokens": tokens,
        "trainable": layout.len(), "frozen": frozen, "peak_rss_mib": peak_rss_mib()?,
        "peak_in_use_mib": round(meter.take_step_peak().0 as f64 / f64::from(1 << 20)),
        "streamed_mib": round(policy.most_streamed() as f64 / f64::from(1 << 20)),
    });
    println!("{report}");
    Ok(())
}

fn spec(flags: &Flags, model: &str) -> Result<RunSpec> {
    let linears = match flags.text("--targets", "all").as_str() {
        "all" => "(q|k|v|o|gate|up|down)_proj",
        "attn" => "(q|k|v|o)_proj",
        other => bail!("--targets {other}: expected all or attn"),
    };
    let recompute = match flags.text("--recompute", "none").as_str() {
        name @ ("none" | "selective" | "full") => json!(name),
        n => json!({"every": n.parse::<usize>().context("--recompute: none, selective, full or a number")?}),
    };
    let (rank, width) = (flags.number("--rank", 16)?, flags.number("--expert-width", 768)?);
    let expert = json!({
        "width": width, "heads": (width / 64).max(1), "layers": flags.number("--expert-layers", 16)?,
        "repeated_noise": flags.number("--repeats", 1)?,
    });
    let batch = flags.number("--batch", 2)?;
    Ok(serde_json::from_value(json!({
        "run": {"name": "bench", "output_dir": "unused"},
        "model": {"path": model, "weights_dtype": flags.text("--weights", "float32"),
            "activations_dtype": flags.text("--activations", "float32")},
        "memory": {"offload": flags.text("--offload", "none")},
        "lora": {"rank": rank, "alpha": rank as f64, "targets": format!(r".*language_model.*\.{linears}")},
        "expert": expert,
        "data": {"path": "unused", "cameras": ["unused"]},
        "train": {"steps": 1, "global_batch": batch, "micro_batch": batch, "recompute": recompute},
    }))?)
}

fn round(milliseconds: f64) -> f64 {
    (milliseconds * 10.0).round() / 10.0
}

fn peak_rss_mib() -> Result<Value> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find(|line| line.starts_with("VmHWM")).context("no VmHWM")?;
    let kib: f64 = line.split_whitespace().nth(1).context("no value")?.parse()?;
    Ok(json!(round(kib / 1024.0)))
}
