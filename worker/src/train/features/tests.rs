//! What a change of data, prompt or model costs: exactly the features that it changes.

mod adapter;

use coxswain_tasks::vla_flow::config::VlaSpec;
use std::{
    path::Path,
    sync::{Arc, Mutex},
};

use burn::backend::Flex;
use coxswain_proto::{
    ids::Step,
    plan::Plan,
    run_spec::{CacheMode, RunSpec},
};
use coxswain_tasks::vla_flow::{
    VlaFlow,
    testing::recording::{Recording, png_of},
};

use crate::{
    link::{Assignment, Commands, Link, LinkError, Phase, Report, SoloLink, StepShare},
    train::{CacheSummary, Summary, TaskTrainer, TrainerOptions},
    trainer::{Trainer, TrainerOutcome},
};

/// Frames of the recording, all different.
const SAMPLES: u64 = 17;

/// Trains an epoch on a recording with a store beside it; what the cache did.
fn train(recording: &Recording, store: &Path, change: impl FnOnce(&mut RunSpec)) -> CacheSummary {
    train_watched(recording, store, change).0
}

/// Trains as [`train`] does; what the cache did, and the phases it went through.
fn train_watched(
    recording: &Recording,
    store: &Path,
    change: impl FnOnce(&mut RunSpec),
) -> (CacheSummary, Vec<Phase>) {
    let (data, output) = (recording.write(), tempfile::tempdir().expect("a temporary directory"));
    let mut spec = recording.spec(data.path());
    spec.run.output_dir = output.path().display().to_string();
    spec.train.steps = Some(5);
    let mut vla = spec.vla_mut();
    (vla.sensor.tokens, vla.sensor.width) = (2, 8);
    drop(vla);
    let mut vla = spec.vla_mut();
    (vla.expert.width, vla.expert.layers, vla.expert.heads) = (16, 2, 2);
    drop(vla);
    spec.cache.mode = CacheMode::Exact;
    spec.cache.dir = Some(store.display().to_string());
    change(&mut spec);
    let mut trainer = TaskTrainer::<Flex>::new(
        coxswain_tasks::leaked(VlaFlow::<Flex>::default()),
        TrainerOptions { device: Default::default(), listener: None },
    );
    let facts = trainer.open(&spec).expect("the recording is sound");
    assert_eq!(facts.training_samples, SAMPLES);
    let plan = Plan::new(&spec.train, SAMPLES).expect("a possible plan");
    let link = SoloLink::new(Step(0)).with_cache(&spec.cache, &plan, None);
    let phases = Arc::<Mutex<Vec<Phase>>>::default();
    let link = RecordingLink { link, phases: phases.clone() };
    assert_eq!(trainer.train(&spec, Box::new(link)), TrainerOutcome::Done);
    let text = std::fs::read_to_string(output.path().join("summary.json")).expect("a summary");
    let summary: Summary = serde_json::from_str(&text).expect("of the right shape");
    let phases = phases.lock().expect("nobody panicked").clone();
    (summary.cache.expect("the cache was on"), phases)
}

/// Writes down what the coordinator would be told of phases.
struct RecordingLink {
    link: SoloLink,
    phases: Arc<Mutex<Vec<Phase>>>,
}

impl Link for RecordingLink {
    fn assignment(&mut self, why: Option<&str>) -> Result<Assignment, LinkError> {
        self.link.assignment(why)
    }

    fn has_generations(&self) -> bool {
        self.link.has_generations()
    }

    fn lease(&mut self, step: Step, samples: u64) -> Result<StepShare, LinkError> {
        self.link.lease(step, samples)
    }

    fn lease_ahead(&mut self, step: Step, samples: u64) -> Result<Option<StepShare>, LinkError> {
        self.link.lease_ahead(step, samples)
    }

    fn commands(&mut self) -> Commands {
        self.link.commands()
    }

    fn wait_while_paused(&mut self) -> Result<(), LinkError> {
        self.link.wait_while_paused()
    }

    fn at(&mut self, phase: Phase, _step: Step) {
        self.phases.lock().expect("nobody panicked").push(phase);
    }

    fn report(&mut self, report: Report) -> Result<(), LinkError> {
        self.link.report(report)
    }
}

#[test]
fn waiting_for_the_store_is_a_phase_in_which_disks_are_given_time() {
    let store = tempfile::tempdir().expect("a temporary directory");
    let (_, phases) = train_watched(&Recording::default(), store.path(), |_| {});
    let wait = [Phase::Communication, Phase::CacheBuild, Phase::Communication, Phase::Optimizer];
    assert!(phases.windows(4).any(|some| some == wait), "the epoch's end: {phases:?}");
    // At the end of the run, and with its checkpoint.
    let publishes = [Phase::Optimizer, Phase::CacheBuild, Phase::Optimizer];
    assert!(phases.windows(3).any(|some| some == publishes), "{phases:?}");
}

/// Samples that are computed when a recording that is stored comes back changed.
fn misses(recording: &Recording, change: impl FnOnce(&mut RunSpec)) -> u64 {
    let store = tempfile::tempdir().expect("a temporary directory");
    let first = train(&Recording::default(), store.path(), |_| {});
    assert_eq!((first.hits, first.misses), (0, SAMPLES));
    let again = train(recording, store.path(), change);
    assert_eq!(again.hits + again.misses, SAMPLES);
    again.misses
}

#[test]
fn the_same_recording_somewhere_else_is_all_there() {
    assert_eq!(misses(&Recording::default(), |_| {}), 0);
}

#[test]
fn one_pixel_of_one_image_is_one_sample() {
    let (name, height, width) = Recording::default().cameras[0];
    assert_eq!(name, "observation.images.front");
    let mut pixels = vec![60; 3 * height * width];
    pixels[3 * (4 * width + 3)] += 1;
    let changed =
        Recording { image: Some((6, Some(png_of(&pixels, height, width)))), ..Recording::default() };
    assert_eq!(misses(&changed, |_| {}), 1);
}

#[test]
fn one_word_of_one_task_is_the_samples_of_that_task() {
    let changed = Recording {
        episode_task: |n| format!("{} {n}", if n == 2 { "job of" } else { "task of episode" }),
        ..Recording::default()
    };
    assert_eq!(misses(&changed, |_| {}), 7, "the third episode has seven frames");
}

#[test]
fn the_template_and_the_pixel_limit_are_everything() {
    let recording = Recording::default();
    assert_eq!(misses(&recording, |spec| spec.vla_mut().data.prompt.push('.')), SAMPLES);
    let limited = misses(&recording, |spec| spec.vla_mut().data.max_pixels = Some(4 * 56 * 56));
    assert_eq!(limited, SAMPLES);
}

/// The model that ships with the repository, with one bit of a tensor inverted.
fn with_one_weight_changed(from: &str, tensor: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().expect("a temporary directory");
    for entry in std::fs::read_dir(from).expect("the model is there") {
        let path = entry.expect("readable").path();
        std::fs::copy(&path, dir.path().join(path.file_name().expect("a file"))).expect("copied");
    }
    let file = dir.path().join("model.safetensors");
    let mut bytes = std::fs::read(&file).expect("it has weights");
    let (header, metadata) = safetensors::SafeTensors::read_metadata(&bytes).expect("safetensors");
    let begin = 8 + header + metadata.info(tensor).expect("the tensor is there").data_offsets.0;
    bytes[begin] ^= 1;
    std::fs::write(&file, bytes).expect("written");
    dir
}

#[test]
fn one_frozen_weight_below_the_tap_is_everything_and_one_above_it_nothing() {
    let recording = Recording::default();
    for (tensor, expected) in
        [("visual.blocks.0.attn.qkv.weight", SAMPLES), ("model.layers.5.mlp.up_proj.weight", SAMPLES)]
    {
        let mut kept = None;
        let found = misses(&recording, |spec| {
            let model = with_one_weight_changed(&spec.vla().model.path, tensor);
            spec.vla_mut().model.path = model.path().display().to_string();
            kept = Some(model);
        });
        assert_eq!(found, expected, "{tensor} lies below the final states");
    }
    let store = tempfile::tempdir().expect("a temporary directory");
    let upper = |spec: &mut RunSpec| {
        let lora = serde_json::json!({"rank": 2, "targets": r"model\.language_model\.layers\.[45]\..*proj"});
        spec.vla_mut().lora = Some(serde_json::from_value(lora).expect("adapters"));
    };
    train(&recording, store.path(), upper);
    let mut kept = None;
    let above = train(&recording, store.path(), |spec| {
        upper(spec);
        let model = with_one_weight_changed(&spec.vla().model.path, "model.layers.5.mlp.up_proj.weight");
        spec.vla_mut().model.path = model.path().display().to_string();
        kept = Some(model);
    });
    assert_eq!((above.hits, above.misses), (SAMPLES, 0), "layer 5 lies above the input of layer 4");
}

#[test]
fn a_namespace_says_which_kind_of_device_it_is_of() {
    let store = tempfile::tempdir().expect("a temporary directory");
    train(&Recording::default(), store.path(), |_| {});
    let opened =
        coxswain_feature_store::Store::existing(store.path()).expect("readable").expect("it is there");
    let (namespaces, _) = opened.list().expect("readable");
    let compute: Vec<_> =
        namespaces.iter().map(|namespace| &namespace.description.ingredients.compute).collect();
    assert!(matches!(&compute[..], [one] if one.contains(" on cpu ")), "{compute:?}");
}
