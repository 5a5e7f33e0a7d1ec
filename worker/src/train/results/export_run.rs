//! `cox export`: what a user takes away, of any checkpoint that is there.
//!
//! The files of a run's end ([`export`](super::export)), but for its summary, which is of training. The
//! model's own weights are not needed for them and are streamed past if they must be read at all.
//!
//! Step 0 has no checkpoint: what a run begins with is made again, as its first launch made it.

use std::{
    fs,
    path::{Path, PathBuf},
};

use coxswain_nn::kernels::Tape;
use coxswain_proto::{
    VERSION, document,
    ids::Step,
    run_spec::{Offload, RunSpec, Shard},
};
use coxswain_task::{Assembly, TaskOn};

use super::{
    best::Best,
    checkpoint::{Checkpoint, CheckpointError, Store},
    export::{ExportManifest, texts},
    save,
};
use crate::{
    device::computing::begin_computing,
    train::{TrainError, init_from},
};

/// Which checkpoint of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WhichCheckpoint {
    /// The last one.
    #[default]
    Newest,
    /// The checkpoint of `best.json`.
    Best,
    /// The checkpoint after so many steps; of none: what the run began with.
    Of(Step),
}

/// What to write, and where.
#[derive(Clone, Debug)]
pub struct ExportJob {
    /// Which checkpoint.
    pub which: WhichCheckpoint,
    /// The directory; none: `export/step-N` in the run's own, with `-ema` behind it for the average.
    pub out: Option<PathBuf>,
    /// Whether it is the average of the weights that is wanted, and not the weights.
    pub ema: bool,
    /// Whether the pretrained model with its adapter merged in is wanted, too, in `merged` below it.
    pub merged: bool,
    /// The directory of a policy as LeRobot loads it, to be written instead of everything else.
    pub lerobot: Option<PathBuf>,
}

impl ExportJob {
    fn dir(&self, run_dir: &Path, step: Step) -> PathBuf {
        let kind = if self.ema { "-ema" } else { "" };
        let of_step = || run_dir.join(format!("export/{}{kind}", step.checkpoint_dir()));
        self.out.clone().unwrap_or_else(of_step)
    }

    /// Before the model is read, which may take minutes.
    fn refuse_what_is_there(&self, merged: &Path) -> Result<(), CheckpointError> {
        let foreign = |path: &Path, detail: &str| CheckpointError::Foreign {
            path: path.to_owned(),
            detail: detail.into(),
        };
        if let Some(out) = self.out.as_deref().filter(|out| out.is_file()) {
            return Err(foreign(out, "is a file; name a directory"));
        }
        let mut asked = self.merged.then_some(merged).into_iter().chain(self.lerobot.as_deref());
        let there = asked.find(|path| path.exists());
        there
            .map_or(Ok(()), |path| Err(foreign(path, "already exists; remove it, or name another directory")))
    }
}

/// What was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportSummary {
    /// Steps of training.
    pub step: Step,
    /// The directory.
    pub dir: PathBuf,
    /// The merged model; none if there was nothing to merge, or it was not wanted.
    pub merged: Option<PathBuf>,
    /// What the types in a policy directory of LeRobot's have cost.
    pub rounding: Option<String>,
}

/// Writes the artifacts of a checkpoint of the run.
pub fn export_run<B: Tape<Base = B>>(
    task: &'static dyn TaskOn<B>,
    spec: &RunSpec,
    job: &ExportJob,
    device: &B::Device,
) -> Result<ExportSummary, TrainError> {
    begin_computing(spec);
    let run_dir = Path::new(&spec.run.output_dir);
    let found = find(run_dir, job.which)?;
    let step = Step(found.as_ref().map_or(0, |found| found.manifest.step));
    let dir = job.dir(run_dir, step);
    let merged = dir.join("merged");
    job.refuse_what_is_there(&merged)?;
    let samples = task.open(spec)?;
    let mut light = spec.clone();
    light.memory.offload = Offload::Layers;
    light.memory.shard = Shard::None;
    // What cannot be streamed is held, as it was in training.
    if task.sizes(&light).is_err() {
        light.memory.offload = spec.memory.offload;
    }
    let Assembly { objective, layout, .. } = task.load(&light, &*samples, device)?;
    let values = match &found {
        Some(found) => {
            let mut values = save::read_trainables(found, &layout)?;
            if job.ema {
                values.splice(..layout.len(), save::read_average_of(found, &layout)?);
            }
            values
        }
        // Their average begins with them.
        None => {
            let mut initial = objective.initial_values(&layout)?;
            init_from::take(task, spec, &layout, &mut initial)?;
            initial
        }
    };
    if let Some(out) = &job.lerobot {
        let Some(written) = objective.export_lerobot(out, &layout, &values) else {
            let detail = "is not written: the run did not start from a LeRobot policy".into();
            return Err(CheckpointError::Foreign { path: out.clone(), detail }.into());
        };
        return Ok(ExportSummary { step, dir: out.clone(), merged: None, rounding: Some(written?) });
    }
    // First, for a run that has nothing to merge leaves nothing.
    if job.merged {
        let Some(outcome) = objective.export_merged(&merged, &layout, &values) else {
            let detail = "is not written: this run has no adapter, or its task writes no merged model".into();
            return Err(CheckpointError::Foreign { path: merged, detail }.into());
        };
        outcome?;
    }
    fs::create_dir_all(&dir).map_err(|source| TrainError::Io {
        action: "create",
        path: dir.clone(),
        source,
    })?;
    let artifacts = objective.export(&dir, &layout, &values)?;
    let manifest = ExportManifest {
        version: VERSION,
        run: &spec.run.name,
        spec_digest: &document::digest(spec),
        base_model: objective.base(),
        steps: step.0,
        files: Vec::new(),
    };
    manifest.write(&dir, artifacts, texts(&*samples, spec))?;
    Ok(ExportSummary { step, dir, merged: job.merged.then_some(merged), rounding: None })
}

/// The checkpoint; none if it is what the run began with that is wanted.
fn find(run_dir: &Path, which: WhichCheckpoint) -> Result<Option<Checkpoint>, CheckpointError> {
    let store = Store::new(run_dir);
    let step = match which {
        WhichCheckpoint::Newest => return store.newest().map(Some),
        WhichCheckpoint::Of(Step(0)) => return Ok(None),
        WhichCheckpoint::Of(step) => step.0,
        WhichCheckpoint::Best => best(run_dir)?,
    };
    let complete = store.complete()?;
    let steps: Vec<_> = complete.iter().map(|found| found.manifest.step).collect();
    let found = complete.into_iter().find(|found| found.manifest.step == step);
    found.map(Some).ok_or_else(|| CheckpointError::Foreign {
        path: store.path(step),
        detail: format!("there is no such checkpoint; steps with a checkpoint: {steps:?}"),
    })
}

/// The step of the best checkpoint.
fn best(run_dir: &Path) -> Result<u64, CheckpointError> {
    let unknown = || CheckpointError::Foreign {
        path: run_dir.join(Best::FILE),
        detail: "no best checkpoint is known; set `eval.every` while training, or give --step N".into(),
    };
    Best::load(run_dir).map(|best| best.step).ok_or_else(unknown)
}
