//! What the data threads make of a run's data: micro-batches read, decoded, resized and collated ahead of a
//! trainer that does nothing with them.
//!
//! ```text
//! cargo bench --bench loader -- --config RUN.yaml [--threads 2] [--micro 8] [--depth 4] [--warmup 4]
//!     [--batches 40]
//! python integration-tests/bench/loader_vs_lerobot.py     the same next to LeRobot's loader
//! ```
//!
//! Prints JSON: samples a second, the shape of a batch, and the resident set when half and when all was read.

use std::{ops::Range, path::Path, sync::Arc, time::Instant};

use anyhow::{Context, Result};
use burn::backend::Flex;
use coxswain_proto::{ids::Step, run_spec::RunSpec};
use coxswain_task::Task;
use coxswain_tasks::vla_flow::{VlaFlow, data::MicroBatch};
use coxswain_worker::{
    feeder::{Prefetcher, StepRequest},
    memory::CountingAllocator,
};
use serde_json::json;

/// As the `cox` binary has it.
#[global_allocator]
static ALLOCATOR: CountingAllocator<mimalloc::MiMalloc> = CountingAllocator(mimalloc::MiMalloc);

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().collect();
    let flag = |name: &str| args.iter().position(|arg| arg == name).and_then(|at| args.get(at + 1));
    let number = |name: &str, usual: u64| flag(name).map_or(Ok(usual), |text| text.parse());
    let Some(config) = flag("--config") else {
        // `cargo bench` and `cargo test --benches` run every benchmark; without data nothing is timed.
        println!("loader: no --config, skipped");
        return Ok(());
    };
    let [threads, depth] = [number("--threads", 2)? as usize, number("--depth", 4)? as usize];
    let (micro, warmup, batches) = (number("--micro", 8)?, number("--warmup", 4)?, number("--batches", 40)?);
    let spec = RunSpec::load(Path::new(config), &[], coxswain_tasks::TASKS)?;
    let samples = VlaFlow::<Flex>::default().open(&spec)?;
    let order = samples.order(spec.run.seed);
    let an_epoch = samples.epoch_len() / micro;
    anyhow::ensure!(an_epoch > 0, "fewer samples than a micro-batch");
    let mut prefetch = Prefetcher::start(Arc::clone(&samples), order, depth, threads)?;
    let mut begun = Instant::now();
    let (mut shape, mut half_mib) = (json!(null), 0);
    let mut requested = 0;
    for batch in 0..warmup + batches {
        while requested < (batch + 2 * depth as u64).min(warmup + batches) {
            prefetch.request(request(requested, an_epoch, micro))?;
            requested += 1;
        }
        if batch == warmup {
            begun = Instant::now();
        }
        let made = prefetch.next(Step(batch))?.context("a batch of every step")?;
        if batch == 0 {
            let made = made.batch.content::<MicroBatch>();
            shape = json!({
                "samples": made.sample_indices.len(), "tokens": made.seq_len,
                "images": made.image_shapes.len(), "first_shape": made.image_shapes.first(),
            });
        }
        if batch == warmup + batches / 2 {
            half_mib = resident_mib();
        }
    }
    let seconds = begun.elapsed().as_secs_f64();
    let all = (batches * micro) as f64;
    println!(
        "{}",
        json!({
            "samples_per_s": all / seconds, "batch": shape, "threads": threads,
            "resident_mib": [half_mib, resident_mib()],
        })
    );
    Ok(())
}

/// A step of one micro-batch, epoch after epoch.
fn request(step: u64, an_epoch: u64, micro: u64) -> StepRequest {
    let first = step % an_epoch * micro;
    let positions: Vec<Range<u64>> = vec![first..first + micro];
    StepRequest {
        step: Step(step),
        epoch: step / an_epoch,
        positions,
        micro_batch: micro as usize,
        kept: None,
    }
}

/// Pages of this process in memory, of 4 KiB.
fn resident_mib() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    text.split(' ').nth(1).and_then(|pages| pages.parse::<u64>().ok()).unwrap_or(0) * 4 / 1024
}
