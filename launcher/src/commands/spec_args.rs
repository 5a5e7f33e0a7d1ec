//! A run file on the command line.

use std::path::{Path, PathBuf};

use coxswain_data::place::{
    self,
    hub::{self, Repository},
};
use coxswain_proto::{document, run_spec::RunSpec};
use coxswain_worker::train::{TrainError, check_base, check_brought, content_digest};

use crate::{
    endpoint,
    exit::{CliError, Outcome},
    gpu::Driver,
    tasks::{schemas, tasks},
};

/// What a run file means beside a GPU that does not say what is recomputed.
pub const ON_GPU: &str = "train.recompute?=auto";

/// A configuration and what is laid over it.
#[derive(clap::Args, Clone, Debug)]
pub struct SpecArgs {
    /// Run file (YAML), or the output directory of a run to resume
    #[arg(value_name = "CONFIG")]
    pub config: PathBuf,
    /// Overrides of the run file: section.key=value
    #[arg(value_name = "KEY=VALUE")]
    pub overrides: Vec<String>,
    /// Section of the run file to use
    #[arg(long, value_name = "NAME", alias = "config-section", alias = "config_section")]
    pub section: Option<String>,
    /// Find the largest micro-batch that fits, by trial steps (train.auto_micro_batch=true)
    #[arg(long, alias = "auto_batch_size")]
    pub auto_batch_size: bool,
}

impl SpecArgs {
    /// Reads and checks the run.
    pub fn load(&self) -> Result<RunSpec, CliError> {
        self.load_with(&[])
    }

    /// Reads and checks the run with further changes. The output directory of a run stands for what ran in
    /// it.
    pub fn load_with(&self, changes: &[String]) -> Result<RunSpec, CliError> {
        let is_beside_gpu = Driver::load().and_then(|driver| driver.gpus()).is_ok();
        let yielding = is_beside_gpu.then(|| ON_GPU.to_owned());
        let changes = self.changes().into_iter().chain(changes.iter().cloned()).chain(yielding);
        let changes: Vec<_> = changes.collect();
        let given = self.config.display();
        if given.to_string().contains('=') && !self.config.exists() {
            return Err(CliError::usage(format!(
                "{given} is an override; give the run file before it: FILE {given}"
            )));
        }
        if !self.config.is_dir() {
            return of_file(&self.config, &changes);
        }
        of_file(&file_of_run(&self.config)?, &[vec![placed(&self.config)], changes].concat())
    }

    /// The run, with the content of its pretrained model and of what it starts from in its identity: for
    /// those who launch it. Where the file says a digest, workers hold what they read against that.
    pub fn load_to_launch(&self) -> Result<RunSpec, CliError> {
        let mut spec = self.load()?;
        pin(&mut spec)?;
        Ok(spec)
    }

    /// All that is laid over the file.
    pub fn changes(&self) -> Vec<String> {
        let auto = self.auto_batch_size.then(|| "train.auto_micro_batch=true".to_owned());
        self.overrides.iter().cloned().chain(self.section.as_deref().map(choice)).chain(auto).collect()
    }
}

/// The override that `--section` stands for.
pub fn choice(section: &str) -> String {
    format!("section={section}")
}

/// Finds `train.init_digest` and `train.base_digest` where the run file leaves them to the launch.
pub fn pin(spec: &mut RunSpec) -> Result<(), CliError> {
    let before = launched_before(spec);
    pin_as(spec, before)
}

/// Finds the digests as [`pin`] does, for a run that was launched like this before, if it is to go on.
pub fn pin_as(spec: &mut RunSpec, before: Option<RunSpec>) -> Result<(), CliError> {
    let task = tasks().of(spec).map_err(CliError::bad_input)?;
    if spec.train.init_from.is_some() {
        // A run that goes on has its own: what it once started from need not be there any more.
        let known = before.as_ref().filter(|before| before.train.init_from == spec.train.init_from);
        let known = known.and_then(|before| before.train.init_digest.clone());
        if known.is_none() {
            check_brought(task, spec).map_err(TrainError::from)?;
        }
        if spec.train.init_digest.is_none() {
            let found = || content_digest(task, spec).map_err(TrainError::from);
            spec.train.init_digest = known.map_or_else(found, |known| Ok(Some(known)))?;
        }
    }
    // A run that was begun by a version that did not name its model by content goes on in its place.
    let as_before = |before: &RunSpec| {
        let moved = || {
            document::differences(before, spec)
                .iter()
                .any(|of| spec.base().is_some_and(|at| at.key == of.key))
        };
        before.train.base_digest.is_none() && !moved()
    };
    if spec.train.base_digest.is_none() && !before.as_ref().is_some_and(as_before) {
        // What cannot be read is said once, and not by every worker after its own attempts.
        spec.train.base_digest = task.base_digest(spec).transpose().map_err(TrainError::from)?;
    }
    Ok(())
}

/// The run in this output directory as it was launched, if it is to go on.
pub fn launched_before(spec: &RunSpec) -> Option<RunSpec> {
    let file = Path::new(&spec.run.output_dir).join(endpoint::SPEC_FILE);
    serde_json::from_slice(&std::fs::read(file).ok().filter(|_| spec.train.resume)?).ok()
}

/// The run of an output directory, as it was trained but for these changes.
pub fn of_run(run_dir: &Path, changes: &[String]) -> Result<RunSpec, CliError> {
    let file = file_of_run(run_dir)?;
    let mut overrides = vec![placed(run_dir)];
    // What reads a run is one process, and has nobody to share frozen weights out with.
    overrides.push("memory.shard=none".into());
    let trained = (!changes.is_empty()).then(|| of_file(&file, &overrides)).transpose()?;
    overrides.extend(changes.iter().cloned());
    let spec = of_file(&file, &overrides)?;
    trained.map_or(Ok(()), |trained| refuse_other_model(run_dir, &trained, &spec))?;
    find_model(&spec).map(|()| spec)
}

/// Sections that say nothing of what weights a checkpoint has; all others are of a task's networks.
const OUTSIDE: [&str; 7] = ["cache", "data", "eval", "optimizer", "run", "task", "train"];
/// Keys of the others by which the same weights are read elsewhere, or otherwise.
const OF_READING: [&str; 4] = ["path", "weights_dtype", "activations_dtype", "sampling_steps"];

/// Refuses to read weights as those of a model that they are not: with another `lora.alpha` they would be
/// another adapter, without a word.
fn refuse_other_model(run_dir: &Path, trained: &RunSpec, spec: &RunSpec) -> Outcome {
    let is_other = |key: &str| {
        let (section, name) = key.split_once('.').unwrap_or_default();
        !OUTSIDE.contains(&section) && !OF_READING.contains(&name)
    };
    let differences = document::differences(trained, spec);
    match differences.iter().find(|of| !of.may_change() && is_other(&of.key)) {
        Some(other) => Err(CliError::usage(format!(
            "{}: its weights were trained with another {other}; leave the override out",
            run_dir.display()
        ))),
        None => Ok(()),
    }
}

/// Refuses a run whose pretrained model has gone, or has become another one.
fn find_model(spec: &RunSpec) -> Result<(), CliError> {
    let Some(base) = spec.base() else { return Ok(()) };
    let (key, path) = (base.key, Path::new(base.path));
    if !place::is_remote(path) && !hub::directory(path, Repository::Model).is_ok_and(|dir| dir.exists()) {
        let told =
            "the model that this run was trained on does not exist; if it has moved, give its new path";
        return Err(CliError::bad_input(format!("{key} {}: {told}: {key}=DIR", base.path)));
    }
    Ok(check_base(tasks().of(spec).map_err(CliError::bad_input)?, spec)?)
}

/// Refuses a path that is no run's output directory, of which each has this `sign`. A run file has one, and
/// says where.
pub fn no_run(path: &Path, sign: &Path) -> CliError {
    let of_file = path.is_file().then(|| RunSpec::load(path, &[], schemas()).ok()).flatten();
    let remedy = match of_file {
        Some(spec) => format!("it is a run file: name its run.output_dir, {}", spec.run.output_dir),
        None => "name such a directory (`cox runs` lists the runs in runs/); `cox run` and `cox check` \
                 also accept a run file"
            .into(),
    };
    let (path, sign) = (path.display(), sign.display());
    CliError::usage(format!("{path}: not the output directory of a run (there is no {sign}); {remedy}"))
}

/// Where an output directory says what was trained in it.
fn file_of_run(run_dir: &Path) -> Result<PathBuf, CliError> {
    let file = run_dir.join(endpoint::SPEC_FILE);
    // One that was launched and has not trained yet.
    let launched = run_dir.join("logs").join(endpoint::SPEC_FILE);
    match [&file, &launched].into_iter().find(|file| file.exists()) {
        Some(found) => Ok(found.clone()),
        None => Err(no_run(run_dir, &file)),
    }
}

/// The override by which a run lies where its directory is now: it may have been moved since.
fn placed(run_dir: &Path) -> String {
    // JSON is YAML.
    format!("run.output_dir={}", serde_json::json!(run_dir))
}

/// The run of a file, whose buckets are read through its cache from now on.
pub fn of_file(file: &Path, changes: &[String]) -> Result<RunSpec, CliError> {
    let spec = RunSpec::load(file, changes, schemas())?;
    place::keep(&spec.data.bucket_cache);
    Ok(spec)
}
