//! The loader on a data set behind a slow network, beside the same on the disk: samples a second in the first
//! epoch and in the second, with nothing that computes in between.
//!
//! ```sh
//! cargo bench -p coxswain-integration-tests --bench bucket_loader -- [DATA [LATENCY_MS]]
//! ```
#![allow(clippy::unwrap_used, reason = "a benchmark")]

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use coxswain_integration_tests::repository;
use coxswain_proto::ids::Step;
use coxswain_task::Samples;
use coxswain_tasks::vla_flow::{data::Dataset, testing::spec};
use coxswain_worker::feeder::{Prefetcher, StepRequest};

#[allow(dead_code, reason = "more of it is for the tests that it belongs to")]
#[path = "../../worker/remote/tests/suite/server.rs"]
mod server;

/// Samples of a step, steps requested ahead as a worker does, threads that read, micro-batches ready.
const STEP: u64 = 16;
const AHEAD: u64 = 4;
const THREADS: usize = 2;
const DEPTH: usize = 4;

fn main() {
    let mut arguments = std::env::args().skip(1).filter(|argument| !argument.starts_with("--"));
    let mini = || repository().join("configs/assets/metaworld-mini");
    let dir = arguments.next().map_or_else(mini, PathBuf::from);
    let latency = arguments.next().map_or(50, |text| text.parse().expect("milliseconds"));
    coxswain_remote::install();
    let on_disk = measure(&dir);
    let server = server::Server::start(server::Answers::Files(dir), Duration::from_millis(latency));
    let cache = tempfile::tempdir().unwrap();
    let kept = coxswain_remote::Kept { dir: Some(cache.path().to_owned()), bytes: 64 << 30 };
    coxswain_remote::keep(kept);
    let far = measure(Path::new(&server.url()));
    println!("                    disk    {latency} ms away   of its time");
    for (what, [disk, far]) in ["opening", "first epoch", "second epoch"].iter().zip(pairs(on_disk, far)) {
        println!("{what:13} {disk:8.2} s {far:10.2} s {:12.2}", far / disk);
    }
    println!("{} requests", server.requests());
}

fn pairs(one: [f64; 3], other: [f64; 3]) -> impl Iterator<Item = [f64; 2]> {
    one.into_iter().zip(other).map(|(one, other)| [one, other])
}

/// Seconds to open it, and to read each of two epochs.
fn measure(data: &Path) -> [f64; 3] {
    let mut spec = spec(data);
    // What a run names in the Meta-World sets; the keys are those of the repository's own.
    spec.data.holdout_episodes = Vec::new();
    let began = Instant::now();
    let samples: Arc<dyn Samples> = Arc::new(Dataset::open(&spec).unwrap_or_else(|error| panic!("{error}")));
    let opened = began.elapsed().as_secs_f64();
    let order = samples.order(0);
    let steps = order.len() / STEP;
    let mut prefetcher = Prefetcher::start(samples, order, DEPTH, THREADS).unwrap();
    let epoch = |prefetcher: &mut Prefetcher, epoch: u64| {
        let began = Instant::now();
        let mut requested = 0;
        for step in 0..steps {
            while requested < steps.min(step + AHEAD) {
                let positions = vec![requested * STEP..(requested + 1) * STEP];
                let step = Step(epoch * steps + requested);
                prefetcher
                    .request(StepRequest { step, epoch, positions, micro_batch: 8, kept: None })
                    .unwrap();
                requested += 1;
            }
            while prefetcher.next(Step(epoch * steps + step)).unwrap().is_some() {}
        }
        began.elapsed().as_secs_f64()
    };
    [opened, epoch(&mut prefetcher, 0), epoch(&mut prefetcher, 1)]
}
