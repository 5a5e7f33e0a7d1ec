//! Everything that can be found out before training, for `cox check`: the data set opens, samples read, the
//! checkpoint has every tensor in the right shape, adapters find their targets, the output directory and the
//! store of features can be written.

use std::{
    fmt, fs, io,
    path::{Path, PathBuf},
};

use coxswain_proto::{
    human,
    ids::Step,
    in_place,
    plan::Plan,
    run_spec::{CacheMode, RunSpec},
};
use nix::sys::statvfs::statvfs;
use serde::Serialize;

use super::{TrainError, checkpoint, describe, features, init_from, warnings};
use coxswain_feature_store::{Store as FeatureStore, StoreError};
use coxswain_nn::{kernels::Tape, params::TrainableLayout, rules::state_bytes};
use coxswain_task::{Assembly, Module, Task, TaskOn};

/// What a run will be.
#[derive(Clone, Debug, Serialize)]
pub struct CheckReport {
    /// Samples trained on in an epoch.
    pub training_samples: u64,
    /// Samples of held-out episodes.
    pub holdout_samples: u64,
    /// What the task says of its data: label and text.
    pub data: Vec<(&'static str, String)>,
    /// Steps of an epoch.
    pub steps_per_epoch: u64,
    /// Steps of the run.
    pub total_steps: u64,
    /// What is frozen and what trains.
    #[serde(skip)]
    pub modules: Vec<Module>,
    /// Elements that train.
    pub trainable: u64,
    /// What else the task has to say.
    pub notes: Vec<String>,
    /// What in the data is probably not meant so.
    pub warnings: Vec<String>,
    /// Bytes of one checkpoint.
    pub checkpoint_bytes: u64,
    /// Where features are kept, and what is there; none if the cache is off.
    pub features: Option<String>,
    /// The step a complete checkpoint would be resumed at.
    pub resumes_at: Option<u64>,
}

/// Reads everything a run would read that `resumes_at` a step, and trains nothing. Leaves no trace on the
/// disk.
pub fn check<B: Tape<Base = B>>(
    task: &'static dyn TaskOn<B>,
    spec: &RunSpec,
    device: &B::Device,
    resumes_at: Option<Step>,
) -> Result<CheckReport, TrainError> {
    let samples = task.open(spec)?;
    let plan = Plan::new(&spec.train, samples.epoch_len())?;
    let data = samples.describe()?;
    let Assembly { objective, layout, mut initial } = task.load(spec, &*samples, device)?;
    let starts = init_from::take(task, spec, &layout, &mut initial)?;
    init_from::bring(task, spec, &layout, &mut initial)?;
    let features = features_store(spec)?;
    Ok(CheckReport {
        training_samples: samples.training_len(),
        holdout_samples: samples.holdout().len() as u64,
        data,
        steps_per_epoch: plan.steps_per_epoch(),
        total_steps: plan.total_steps(),
        modules: objective.modules(&layout),
        trainable: layout.len() as u64,
        notes: objective.notes().into_iter().chain(starts).collect(),
        warnings: warnings(spec, &*samples),
        checkpoint_bytes: checkpoint_bytes(spec, &layout),
        features,
        resumes_at: resumes_at.map(|step| step.0),
    })
}

/// Refuses another pretrained model than the one that the run was launched with. One that cannot be read is
/// refused where it is loaded, with the reason.
pub fn check_base(task: &dyn Task, spec: &RunSpec) -> Result<(), TrainError> {
    let (Some(launched), Some(place)) = (&spec.train.base_digest, spec.base()) else { return Ok(()) };
    match task.base_digest(spec) {
        Some(Ok(found)) if !found.eq_ignore_ascii_case(launched) => Err(TrainError::OtherModel {
            key: place.key.to_owned(),
            path: place.path.to_owned(),
            found,
            launched: launched.clone(),
        }),
        _ => Ok(()),
    }
}

/// Passes on a run whose store of features can be opened, or that keeps none.
pub fn check_features(spec: &RunSpec) -> Result<(), TrainError> {
    features_store(spec).map(drop)
}

/// The store that a run would open, in words, after finding out that it can be: of a version known here, and
/// readable; or new, and taking files. None if the run keeps nothing.
fn features_store(spec: &RunSpec) -> Result<Option<String>, TrainError> {
    if spec.cache.mode == CacheMode::Off {
        return Ok(None);
    }
    let dir = features::store_dir(spec);
    let there = match FeatureStore::existing(&dir)? {
        Some(store) => {
            let closed = store
                .read_only()
                .map(|why| format!("; no features will be added, because it cannot be written: {why}"));
            format!("already has {}{}", human::bytes(store.bytes()?), closed.unwrap_or_default())
        }
        None => {
            let failed = |source| StoreError::Io { action: "write below", path: dir.clone(), source };
            check_writable(&dir).map_err(failed)?;
            "is new".to_owned()
        }
    };
    Ok(Some(format!("{} {there}", dir.display())))
}

/// `dir`, or the nearest directory above it that exists, must take a file. A link to nothing takes none.
pub fn check_writable(dir: &Path) -> io::Result<()> {
    let probe = existing(dir)?.join(format!(".cox-check-{}", std::process::id()));
    in_place::make_anew(&probe).and_then(|_| fs::remove_file(&probe))
}

/// The nearest directory above a path, or itself, that is there.
fn existing(dir: &Path) -> io::Result<PathBuf> {
    let absolute = std::path::absolute(dir)?;
    let exists = |dir: &&Path| dir.symlink_metadata().is_ok();
    Ok(absolute.ancestors().find(exists).unwrap_or(Path::new("/")).to_owned())
}

fn checkpoint_bytes(spec: &RunSpec, layout: &TrainableLayout) -> u64 {
    checkpoint::bytes(layout, state_bytes(&spec.optimizer, layout, &(0..layout.len())))
}

/// Says that the disk has no room for the checkpoints of a run, which may have some already: for one that is
/// kept and the next one, which is written beside it.
pub fn lack_of_room(spec: &RunSpec, layout: &TrainableLayout, resumes: bool) -> Option<String> {
    let output = Path::new(&spec.run.output_dir);
    let disk = statvfs(&existing(output).ok()?).ok()?;
    let free = disk.blocks_available() * disk.fragment_size();
    let one = checkpoint_bytes(spec, layout);
    let count = if resumes { 1 } else { 2 };
    (free < one.saturating_mul(count)).then(|| {
        format!(
            "run.output_dir: {}: only {} are free, while a checkpoint takes {} and is kept until the next \
             one is written; free space, or choose another directory",
            output.display(),
            human::bytes(free),
            human::bytes(one),
        )
    })
}

impl fmt::Display for CheckReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "data      {} training samples, ", self.training_samples)?;
        match self.holdout_samples {
            0 => write!(f, "0 held out: nothing will be evaluated")?,
            held_out => write!(f, "{held_out} held out")?,
        }
        self.data.iter().try_for_each(|(_, text)| write!(f, ", {text}"))?;
        writeln!(f)?;
        writeln!(f, "steps     {} an epoch, {} in all", self.steps_per_epoch, self.total_steps)?;
        for row in &self.modules {
            writeln!(f, "model     {}", describe(row))?;
        }
        writeln!(f, "trains    {} parameters", human::grouped(self.trainable))?;
        self.notes.iter().try_for_each(|note| writeln!(f, "keeps     {note}"))?;
        self.warnings.iter().try_for_each(|warning| writeln!(f, "warning   {warning}"))?;
        write!(f, "on disk   {} a checkpoint", human::bytes(self.checkpoint_bytes))?;
        if let Some(features) = &self.features {
            write!(f, "\nfeatures  {features}")?;
        }
        match self.resumes_at {
            Some(step) => write!(f, "\nresumes   at step {step}"),
            None => Ok(()),
        }
    }
}
