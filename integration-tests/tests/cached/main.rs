//! Training with kept features, in this process: what the cache may change is time, never a bit.
//!
//! Runs share a store where a test says so; a store that has everything is *warm*, one that has nothing is
//! *cold*.

mod drift;
mod exact;
mod faults;
mod periodic;
mod video;
mod world;

use std::{
    collections::BTreeSet,
    ops::Range,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
};

use burn_flex::Flex;
use coxswain_integration_tests::solo::{outcome, quickstart, summary};
use coxswain_proto::{
    cache_plan::{CacheDecision, CacheUse},
    ids::Step,
    run_spec::RunSpec,
};
use coxswain_tasks::vla_flow::VlaFlow;
use coxswain_worker::{
    collective::RingListener,
    link::{Assignment, Commands, Link, LinkError, Phase, Report, SoloLink, StepShare},
    train::{CacheSummary, Summary, TaskTrainer, TrainerOptions},
    trainer::TrainerOutcome,
};

/// Samples of the data set's first episode, the only one that these tests train on.
const SAMPLES: u64 = 64;
/// Samples of a step.
const BATCH: u64 = 16;
/// Steps of an epoch.
const EPOCH: u64 = SAMPLES / BATCH;

/// LoRA on the last two of six decoder layers, as an override.
const UPPER_LAYERS: &str =
    r"lora.targets=model\.language_model\.layers\.[45]\.(self_attn\.(q|k|v|o)_proj|mlp\.(gate|up|down)_proj)";

/// A run of the tiny policy over the first episode. `overrides` come last.
fn spec(output: &Path, overrides: &[&str]) -> RunSpec {
    let batch = format!("train.global_batch={BATCH}");
    let own = [
        "data.holdout_episodes=[1,2,3]",
        &batch,
        "train.micro_batch=4",
        "train.checkpoint_every=0",
        "expert.layers=2",
        "expert.repeated_noise=1",
        // So that the adapter and its features move visibly within a few steps.
        "optimizer.lr.lora=1e-3",
    ];
    quickstart(output, &[&own[..], overrides].concat())
}

/// What a run left behind.
struct Run {
    output: PathBuf,
    summary: Summary,
    /// All notes, in order.
    notes: Vec<String>,
    /// By step: the generation that served, and what the cache did.
    steps: Vec<(Step, u64, CacheUse)>,
    /// By step: the learning rate of LoRA.
    rates: Vec<f64>,
    /// Steps that computed features, or compared some.
    built: Vec<u64>,
}

impl Run {
    fn losses(&self) -> Vec<u64> {
        self.summary.losses.iter().map(|loss| loss.to_bits()).collect()
    }

    fn file(&self, name: &str) -> Vec<u8> {
        std::fs::read(self.output.join(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
    }

    /// Everything that was learned.
    fn learned(&self) -> [Vec<u8>; 3] {
        ["adapter/adapter_model.safetensors", "expert.safetensors", "sensor.safetensors"]
            .map(|f| self.file(f))
    }

    fn cache(&self) -> &CacheSummary {
        self.summary.cache.as_ref().expect("the cache was on")
    }

    /// Hits and misses over the run.
    fn used(&self) -> (u64, u64) {
        (self.cache().hits, self.cache().misses)
    }

    fn generations(&self) -> Vec<u64> {
        self.steps.iter().map(|(_, generation, _)| *generation).collect()
    }

    fn notes_with(&self, text: &str) -> usize {
        self.notes.iter().filter(|note| note.contains(text)).count()
    }

    /// Bit for bit the same training.
    #[track_caller]
    fn assert_same(&self, other: &Run) {
        assert_eq!(self.losses(), other.losses(), "losses differ");
        assert!(self.learned() == other.learned(), "equal losses, but something else was learned");
    }
}

/// What a link was told.
#[derive(Clone, Default)]
struct LinkRecord {
    reports: Arc<Mutex<Vec<Report>>>,
    /// Phases, one after another.
    phases: Arc<Mutex<Vec<(Phase, u64)>>>,
}

impl LinkRecord {
    fn report(&self, report: &Report) {
        self.reports.lock().expect("nobody panics with it").push(report.clone());
    }

    fn at(&self, phase: Phase, step: Step) {
        let mut phases = self.phases.lock().expect("nobody panics with it");
        if phases.last().is_none_or(|(last, _)| *last != phase) {
            phases.push((phase, step.0));
        }
    }

    /// Steps in which features were computed or compared. A rank that only waits for the store goes on where
    /// it was; one that fills has waited for data, and goes on with them.
    fn built(&self) -> Vec<u64> {
        let phases = self.phases.lock().expect("nobody panics with it");
        let visits = phases.windows(3).filter(|visit| visit[1].0 == Phase::CacheBuild);
        let works = |visit: &&[(Phase, u64)]| visit[0].0 != visit[2].0 || visit[0].0 == Phase::Data;
        let steps: BTreeSet<u64> = visits.filter(works).map(|visit| visit[1].1).collect();
        steps.into_iter().collect()
    }
}

/// Does something before a step is leased.
type LeaseHook = Box<dyn FnMut(Step) + Send>;

/// [`SoloLink`], with everything that it is told written down.
struct RecordingLink {
    inner: SoloLink,
    heard: LinkRecord,
    before: LeaseHook,
}

impl Link for RecordingLink {
    fn assignment(&mut self, why: Option<&str>) -> Result<Assignment, LinkError> {
        self.inner.assignment(why)
    }
    fn has_generations(&self) -> bool {
        self.inner.has_generations()
    }
    fn lease(&mut self, step: Step, samples: u64) -> Result<StepShare, LinkError> {
        self.inner.lease(step, samples)
    }
    fn lease_ahead(&mut self, step: Step, samples: u64) -> Result<Option<StepShare>, LinkError> {
        self.inner.lease_ahead(step, samples)
    }
    fn decided(&self, step: Step) -> Option<CacheDecision> {
        self.inner.decided(step)
    }
    fn commands(&mut self) -> Commands {
        self.inner.commands()
    }
    fn wait_while_paused(&mut self) -> Result<(), LinkError> {
        self.inner.wait_while_paused()
    }
    fn at(&mut self, phase: Phase, step: Step) {
        self.heard.at(phase, step);
        if phase == Phase::Communication {
            (self.before)(step);
        }
        self.inner.at(phase, step);
    }
    fn report(&mut self, report: Report) -> Result<(), LinkError> {
        self.heard.report(&report);
        self.inner.report(report)
    }
}

/// One rank; `listener` is where its neighbour calls, if it has one.
fn trainer(listener: Option<RingListener>) -> TaskTrainer<Flex> {
    TaskTrainer::new(
        coxswain_tasks::leaked(VlaFlow::<Flex>::default()),
        TrainerOptions { device: Default::default(), listener },
    )
}

fn solo(spec: &RunSpec) -> Run {
    resumed(spec, 0)
}

/// Trains from the checkpoint of `first_step`.
fn resumed(spec: &RunSpec, first_step: u64) -> Run {
    watched(spec, first_step, Box::new(|_| {}))
}

/// Trains, and calls `before` in every step when its gradients are there and nothing has been updated.
fn watched(spec: &RunSpec, first_step: u64, before: LeaseHook) -> Run {
    let heard = LinkRecord::default();
    let outcome = outcome(&mut trainer(None), spec, first_step, |inner, plan| {
        assert_eq!(plan.steps_per_epoch(), EPOCH);
        Box::new(RecordingLink { inner, heard: heard.clone(), before })
    });
    assert_eq!(outcome, TrainerOutcome::Done);
    collected(spec, &heard)
}

fn collected(spec: &RunSpec, heard: &LinkRecord) -> Run {
    let (output, summary) = (PathBuf::from(&spec.run.output_dir), summary(spec));
    let (mut notes, mut steps, mut rates) = (Vec::new(), Vec::new(), Vec::new());
    for report in heard.reports.lock().expect("nobody panics with it").drain(..) {
        match report {
            Report::Note(note) => notes.push(note),
            Report::Step(done) => {
                steps.push((done.step, done.cache_generation, done.cache));
                let rate = done.metrics.iter().find(|metric| metric.name == "lr/lora");
                rates.extend(rate.map(|rate| rate.value));
            }
            _ => {}
        }
    }
    Run { output, summary, notes, steps, rates, built: heard.built() }
}

/// Names of all parts below a store, and their paths.
fn parts(store: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut open = vec![store.to_path_buf()];
    while let Some(dir) = open.pop() {
        for entry in std::fs::read_dir(dir).expect("the store is there") {
            let path = entry.expect("readable").path();
            match path.is_dir() {
                true => open.push(path),
                false if path.extension().is_some_and(|e| e == "vlc") => found.push(path),
                false => {}
            }
        }
    }
    found.sort();
    found
}

/// Hits and misses of some steps.
fn use_of(run: &Run, steps: Range<u64>) -> (u64, u64) {
    let of = run.steps.iter().filter(|(step, ..)| steps.contains(&step.0));
    of.fold((0, 0), |(hits, misses), (_, _, used)| (hits + used.hits, misses + used.misses))
}
