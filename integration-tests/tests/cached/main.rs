//! Training with kept features, in this process: what the cache may change is time, never a bit.
//!
//! Runs share a store where a test says so; a store that has everything is *warm*, one that has nothing is *cold*.

mod exact;
mod faults;
mod periodic;
mod world;

use std::{
    ops::Range,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
};

use burn_flex::Flex;
use coxswain_proto::{ids::Step, plan::Plan, run_spec::RunSpec};
use coxswain_worker::{
    link::{Assignment, CacheUse, Commands, Leased, Link, LinkError, Phase, Report, SoloLink},
    train::{CacheSummary, PolicyTrainer, Summary, TrainerOptions},
    trainer::{Trainer, TrainerOutcome},
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

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace's root").to_path_buf()
}

/// A run of the tiny policy over the first episode. `overrides` come last.
fn spec(output: &Path, overrides: &[&str]) -> RunSpec {
    let root = root();
    let path = |relative: &str| root.join(relative).display().to_string();
    let mut all = vec![
        format!("run.output_dir={}", output.display()),
        format!("model.path={}", path("configs/assets/tiny-vla")),
        format!("data.path={}", path("configs/assets/metaworld-mini")),
        "data.holdout_episodes=[1,2,3]".to_owned(),
        "eval.samples=4".to_owned(),
        format!("train.global_batch={BATCH}"),
        "train.micro_batch=4".to_owned(),
        "train.checkpoint_every=0".to_owned(),
        "expert.layers=2".to_owned(),
        "expert.repeated_noise=1".to_owned(),
        "optimizer.warmup_steps=2".to_owned(),
        // So that the adapter and its features move visibly within a few steps.
        "optimizer.lr.lora=1e-3".to_owned(),
    ];
    all.extend(overrides.iter().map(ToString::to_string));
    RunSpec::load(&root.join("configs/quickstart.yaml"), &all).expect("the run file is valid")
}

/// What a run left behind.
struct Run {
    output: PathBuf,
    summary: Summary,
    /// All notes, in order.
    notes: Vec<String>,
    /// By step: the generation that served, and what the cache did.
    steps: Vec<(Step, u64, CacheUse)>,
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
struct Heard(Arc<Mutex<Vec<Report>>>);

/// Does something before a step is leased.
type Before = Box<dyn FnMut(Step) + Send>;

/// [`SoloLink`], with everything that it is told written down.
struct Listening {
    inner: SoloLink,
    heard: Heard,
    before: Before,
}

impl Link for Listening {
    fn assignment(&mut self, why: Option<&str>) -> Result<Assignment, LinkError> {
        self.inner.assignment(why)
    }
    fn has_generations(&self) -> bool {
        self.inner.has_generations()
    }
    fn lease(&mut self, step: Step, samples: u64) -> Result<Leased, LinkError> {
        self.inner.lease(step, samples)
    }
    fn lease_ahead(&mut self, step: Step, samples: u64) -> Result<Option<Leased>, LinkError> {
        self.inner.lease_ahead(step, samples)
    }
    fn commands(&mut self) -> Commands {
        self.inner.commands()
    }
    fn wait_while_paused(&mut self) -> Result<(), LinkError> {
        self.inner.wait_while_paused()
    }
    fn at(&mut self, phase: Phase, step: Step) {
        if phase == Phase::Communication {
            (self.before)(step);
        }
        self.inner.at(phase, step);
    }
    fn report(&mut self, report: Report) -> Result<(), LinkError> {
        self.heard.0.lock().expect("nobody panics with it").push(report.clone());
        self.inner.report(report)
    }
}

fn solo(spec: &RunSpec) -> Run {
    resumed(spec, 0)
}

/// Trains from the checkpoint of `first_step`.
fn resumed(spec: &RunSpec, first_step: u64) -> Run {
    watched(spec, first_step, Box::new(|_| {}))
}

/// Trains, and calls `before` in every step when its gradients are there and nothing has been updated.
fn watched(spec: &RunSpec, first_step: u64, before: Before) -> Run {
    let mut trainer =
        PolicyTrainer::<Flex>::new(TrainerOptions { device: Default::default(), listener: None });
    let facts = trainer.open(spec).expect("the data set opens");
    let plan = Plan::new(&spec.train, facts.training_samples).expect("a possible plan");
    assert_eq!(plan.steps_per_epoch(), EPOCH);
    let inner = SoloLink::new(Step(first_step)).with_cache(&spec.cache, &plan);
    let heard = Heard::default();
    let outcome = trainer.train(spec, Box::new(Listening { inner, heard: heard.clone(), before }));
    assert_eq!(outcome, TrainerOutcome::Done);
    collected(spec, &heard)
}

fn collected(spec: &RunSpec, heard: &Heard) -> Run {
    let output = PathBuf::from(&spec.run.output_dir);
    let text = std::fs::read_to_string(output.join("summary.json")).expect("a summary was written");
    let summary = serde_json::from_str(&text).expect("of the right shape");
    let (mut notes, mut steps) = (Vec::new(), Vec::new());
    for report in heard.0.lock().expect("nobody panics with it").drain(..) {
        match report {
            Report::Note(note) => notes.push(note),
            Report::Step(done) => steps.push((done.step, done.cache_generation, done.cache)),
            _ => {}
        }
    }
    Run { output, summary, notes, steps }
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
