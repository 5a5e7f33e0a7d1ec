//! A run file on the command line.

use std::path::{Path, PathBuf};

use coxswain_proto::run_spec::RunSpec;
use coxswain_worker::train::{TrainError, content_digest};

use crate::{
    endpoint,
    exit::{Exit, Failed},
    tasks::{schemas, tasks},
};

/// A configuration and what is laid over it.
#[derive(clap::Args, Clone, Debug)]
pub struct SpecArgs {
    /// Run file (YAML)
    #[arg(value_name = "CONFIG")]
    pub config: PathBuf,
    /// Changes to it: section.key=value
    #[arg(value_name = "KEY=VALUE")]
    pub overrides: Vec<String>,
    /// Which of the file's sections to take
    #[arg(long, value_name = "NAME", alias = "config-section", alias = "config_section")]
    pub section: Option<String>,
    /// Find the largest micro-batch that fits by trial steps; short for train.auto_micro_batch=true
    #[arg(long, alias = "auto_batch_size")]
    pub auto_batch_size: bool,
}

impl SpecArgs {
    /// Reads and checks the run.
    pub fn load(&self) -> Result<RunSpec, Failed> {
        self.load_with(&[])
    }

    /// The same with further changes.
    pub fn load_with(&self, changes: &[String]) -> Result<RunSpec, Failed> {
        Ok(RunSpec::load(&self.config, &[&self.changes(), changes].concat(), schemas())?)
    }

    /// The run, with the content of what it starts from in its identity (`train.init_digest`): for those who
    /// launch it. Where the file says the digest, workers hold what they read against that.
    pub fn load_to_launch(&self) -> Result<RunSpec, Failed> {
        let mut spec = self.load()?;
        pin_init(&mut spec)?;
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

/// Finds `train.init_digest` where the run file leaves it to the launch. A run that goes on has its own: what
/// it once started from need not be there any more.
pub fn pin_init(spec: &mut RunSpec) -> Result<(), Failed> {
    if spec.train.init_digest.is_some() || spec.train.init_from.is_none() {
        return Ok(());
    }
    spec.train.init_digest = launched_with(spec);
    if spec.train.init_digest.is_none() {
        let task = tasks().of(spec).map_err(|unknown| Failed::new(Exit::BadInput, unknown))?;
        spec.train.init_digest = content_digest(task, spec).map_err(TrainError::from)?;
    }
    Ok(())
}

/// The digest with which the run in this output directory was launched, from the same place.
fn launched_with(spec: &RunSpec) -> Option<String> {
    let file = Path::new(&spec.run.output_dir).join(endpoint::SPEC_FILE);
    let text = std::fs::read(file).ok().filter(|_| spec.train.resume)?;
    let before: RunSpec = serde_json::from_slice(&text).ok()?;
    before.train.init_digest.filter(|_| before.train.init_from == spec.train.init_from)
}

/// The run of an output directory, as it was trained but for these changes.
pub fn of_run(run_dir: &Path, changes: &[String]) -> Result<RunSpec, Failed> {
    let file = run_dir.join(endpoint::SPEC_FILE);
    if !file.exists() {
        return Err(Failed::usage(format!(
            "{}: not the output directory of a run (there is no {})",
            run_dir.display(),
            file.display()
        )));
    }
    // The directory may have been moved since. JSON is YAML.
    let mut overrides = vec![format!("run.output_dir={}", serde_json::json!(run_dir))];
    overrides.extend(changes.iter().cloned());
    Ok(RunSpec::load(&file, &overrides, schemas())?)
}
