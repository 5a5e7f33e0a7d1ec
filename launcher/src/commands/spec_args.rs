//! A run file on the command line.

use std::path::PathBuf;

use coxswain_proto::run_spec::RunSpec;

use crate::{exit::Failed, tasks::schemas};

/// A configuration and what is laid over it.
#[derive(clap::Args, Clone, Debug)]
pub struct SpecArgs {
    /// Run file (YAML)
    #[arg(value_name = "CONFIG")]
    pub config: PathBuf,
    /// Changes to it: section.key=value
    #[arg(value_name = "KEY=VALUE")]
    pub overrides: Vec<String>,
    /// Find the largest micro-batch that fits by trial steps; short for train.auto_micro_batch=true
    #[arg(long, alias = "auto_batch_size")]
    pub auto_batch_size: bool,
}

impl SpecArgs {
    /// Reads and checks the run.
    pub fn load(&self) -> Result<RunSpec, Failed> {
        Ok(RunSpec::load(&self.config, &self.changes(), schemas())?)
    }

    /// All that is laid over the file.
    pub fn changes(&self) -> Vec<String> {
        let auto = self.auto_batch_size.then(|| "train.auto_micro_batch=true".to_owned());
        self.overrides.iter().cloned().chain(auto).collect()
    }
}
