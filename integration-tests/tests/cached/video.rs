//! Kept features of videos: over a whole run the decoder is asked for each frame once.

use std::{
    any::Any,
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
};

use burn_flex::Flex;
use coxswain_data::DataError;
use coxswain_integration_tests::{
    repository,
    solo::{outcome, quickstart, summary},
};
use coxswain_proto::{config::TaskSchema, run_spec::RunSpec};
use coxswain_task::{Assembly, Samples, Task, TaskError, TaskOn, memory::Subject};
use coxswain_tasks::vla_flow::{VlaFlow, data::Dataset};
use coxswain_worker::{
    train::{TaskTrainer, TrainerOptions},
    trainer::TrainerOutcome,
};

/// Episodes of 12, 17 and 10 frames, two cameras.
const FRAMES: u64 = 39;
const CAMERAS: u64 = 2;
const EPOCHS: u64 = 3;
const VIDEOS: [(&str, &str); 3] = [
    ("observation.images.front/chunk-000/file-000.mp4", "av1_joined.mp4"),
    ("observation.images.front/chunk-000/file-001.mp4", "av1_g2.mp4"),
    ("observation.images.wrist/chunk-001/file-003.mp4", "h264_joined.mp4"),
];

/// The task of the policy, which remembers what data it has opened.
#[derive(Default)]
struct RememberingTask(Mutex<Option<Arc<dyn Samples>>>);

impl RememberingTask {
    /// Frames that the decoders of its data were asked for.
    fn asked(&self) -> u64 {
        let samples = self.0.lock().expect("no panic").clone().expect("it was opened");
        let samples: &dyn Any = &*samples;
        samples.downcast_ref::<Dataset>().expect("one data set").decoding().shown
    }
}

impl Task for RememberingTask {
    fn schema(&self) -> TaskSchema {
        VlaFlow::<Flex>::default().schema()
    }

    fn open(&self, spec: &RunSpec) -> Result<Arc<dyn Samples>, DataError> {
        let samples = VlaFlow::<Flex>::default().open(spec)?;
        *self.0.lock().expect("no panic") = Some(samples.clone());
        Ok(samples)
    }

    fn sizes(&self, spec: &RunSpec) -> Result<Box<dyn Subject>, TaskError> {
        VlaFlow::<Flex>::default().sizes(spec)
    }

    fn write_sample(&self, spec: &RunSpec, index: u64, out: &Path) -> Result<(), DataError> {
        VlaFlow::<Flex>::default().write_sample(spec, index, out)
    }
}

impl TaskOn<Flex> for RememberingTask {
    fn load(
        &self,
        spec: &RunSpec,
        samples: &dyn Samples,
        device: &<Flex as burn::tensor::backend::BackendTypes>::Device,
    ) -> Result<Assembly<Flex>, TaskError> {
        TaskOn::<Flex>::load(&VlaFlow::<Flex>::default(), spec, samples, device)
    }
}

fn copy(from: PathBuf, to: PathBuf) {
    fs::create_dir_all(to.parent().expect("a file in a folder")).expect("a folder");
    fs::copy(&from, to).unwrap_or_else(|why| panic!("{}: {why}", from.display()));
}

/// The v3.0 set of `worker/data`'s tests, with its videos.
fn recorded(dir: &Path) {
    let fixtures = repository().join("worker/data/tests/fixtures/v3.0");
    for file in ["info.json", "stats.json", "tasks.parquet", "episodes/chunk-000/file-000.parquet"] {
        copy(fixtures.join("meta").join(file), dir.join("meta").join(file));
    }
    let rows = "data/chunk-000/file-000.parquet";
    copy(fixtures.join(rows), dir.join(rows));
    let clips = repository().join("worker/video/tests/fixtures");
    VIDEOS.iter().for_each(|(place, clip)| copy(clips.join(clip), dir.join("videos").join(place)));
}

/// Frames that the decoder was asked for in a run of some epochs, and the run's losses.
fn asked(dir: &Path, run: &str, more: &[&str]) -> (u64, Vec<u64>) {
    let data = format!("data.path={}", dir.join("set").display());
    let epochs = format!("train.epochs={EPOCHS}");
    let own = [
        &data,
        "data.cameras=[observation.images.front, observation.images.wrist]",
        "data.sensor=",
        "data.holdout_episodes=[]",
        "data.horizon=4",
        "train.steps=",
        &epochs,
        "train.global_batch=13",
        "train.micro_batch=13",
        "train.checkpoint_every=0",
        "expert.layers=2",
        "expert.repeated_noise=1",
        "eval.samples=0",
    ];
    let spec = quickstart(&dir.join(run), &[&own[..], more].concat());
    let task: &'static RememberingTask = Box::leak(Box::default());
    let mut trainer = TaskTrainer::new(task, TrainerOptions { device: Default::default(), listener: None });
    assert_eq!(outcome(&mut trainer, &spec, 0, |link, _| Box::new(link)), TrainerOutcome::Done);
    let losses = summary(&spec).losses.iter().map(|loss| loss.to_bits()).collect();
    (task.asked(), losses)
}

#[test]
fn each_frame_is_asked_of_the_decoder_once_over_the_whole_run() {
    let dir = tempfile::tempdir().unwrap();
    recorded(&dir.path().join("set"));
    let store = format!("cache.dir={}", dir.path().join("store").display());
    let exact = ["cache.mode=exact", &store];
    let (live, losses) = asked(dir.path(), "live", &[]);
    let (cold, of_cold) = asked(dir.path(), "cold", &exact);
    let (warm, of_warm) = asked(dir.path(), "warm", &exact);
    assert_eq!(BTreeSet::from([&losses, &of_cold, &of_warm]).len(), 1, "kept features change no bit");
    // Frames that are looked at while the run is set up come on top, as many in each run.
    let set_up = warm;
    assert!(set_up <= 2 * CAMERAS, "{set_up} frames of a run that finds all features");
    assert_eq!(live - set_up, EPOCHS * FRAMES * CAMERAS, "without a cache once in each epoch");
    assert_eq!(cold - set_up, FRAMES * CAMERAS, "with one once");
}
