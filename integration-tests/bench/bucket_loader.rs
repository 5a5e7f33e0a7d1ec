//! The loader on a data set behind a slow network, beside the same on the disk: samples a second in the first
//! epoch and in the second, with nothing that computes in between.
//!
//! ```sh
//! cargo bench -p coxswain-integration-tests --bench bucket_loader -- [DATA [LATENCY_MS [ROUNDS]]]
//! ```
#![allow(clippy::unwrap_used, reason = "a benchmark")]

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use coxswain_integration_tests::repository;
use coxswain_models::families::shelf;
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
    let mut number = |default, what| arguments.next().map_or(default, |text| text.parse().expect(what));
    let (latency, rounds) = (number(50, "milliseconds"), number(1, "rounds"));
    coxswain_remote::install();
    let cache = tempfile::tempdir().unwrap();
    let kept = coxswain_remote::BlockCache { dir: Some(cache.path().to_owned()), bytes: 64 << 30 };
    coxswain_remote::keep(kept);
    // In turns, so that what else the machine does meets both. Each round's server has an address of its own,
    // of which nothing is kept yet.
    let features = features(&dir);
    let mut ratios = [const { Vec::new() }; 3];
    println!("                    disk    {latency} ms away   of its time");
    for _ in 0..rounds {
        let on_disk = measure(&dir, &features);
        let server =
            server::Server::start(server::Answers::Files(dir.clone()), Duration::from_millis(latency));
        let far = measure(Path::new(&server.url()), &features);
        for (number, what) in ["opening", "first epoch", "second epoch"].iter().enumerate() {
            let [disk, far] = [on_disk[number], far[number]];
            println!("{what:13} {disk:8.2} s {far:10.2} s {:12.2}", far / disk);
            ratios[number].push(far / disk);
        }
        println!("{} requests", server.requests());
    }
    let [_, first, second] = ratios.map(|mut ratios: Vec<f64>| {
        ratios.sort_by(f64::total_cmp);
        ratios[ratios.len() / 2]
    });
    println!("medians: first epoch {first:.2}, second epoch {second:.2}");
}

/// Names of what a data set has of each frame.
fn features(dir: &Path) -> Vec<String> {
    let text = std::fs::read_to_string(dir.join("meta/info.json")).unwrap();
    let info: serde_json::Value = serde_json::from_str(&text).unwrap();
    info["features"].as_object().unwrap().keys().cloned().collect()
}

/// Seconds to open it, and to read each of two epochs, of all cameras.
fn measure(data: &Path, features: &[String]) -> [f64; 3] {
    let mut json = serde_json::to_value(spec(data)).unwrap();
    let cameras = features.iter().filter(|name| name.starts_with("observation.images."));
    json["data"]["cameras"] = cameras.cloned().collect();
    json["data"]["holdout_episodes"] = serde_json::json!([]);
    if !features.iter().any(|name| name == "observation.sensor") {
        json["data"].as_object_mut().unwrap().remove("sensor");
    }
    let spec = serde_json::from_value(json).unwrap();
    let began = Instant::now();
    let samples: Arc<dyn Samples> =
        Arc::new(Dataset::from_spec(&spec, shelf()).unwrap_or_else(|error| panic!("{error}")));
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
