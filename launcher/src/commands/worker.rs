//! `cox worker`: one process, one rank.
//!
//! Its place in the world comes from the environment that a launcher gives it (`launch::worker_env`). With `--config` it needs neither
//! launcher nor coordinator: a world of one.

mod session;
mod solo;

use std::path::PathBuf;

use burn_flex::Flex;
use clap::Args;
use coxswain_proto::run_spec::RunSpec;
use coxswain_worker::train::{PolicyTrainer, TrainerOptions};

use crate::exit::Outcome;

/// Flags of `cox worker`.
#[derive(Args, Debug)]
pub struct WorkerArgs {
    /// Train alone, without a coordinator
    #[arg(long, value_name = "CONFIG")]
    config: Option<PathBuf>,
    /// Changes to the configuration: section.key=value
    #[arg(value_name = "KEY=VALUE", requires = "config")]
    overrides: Vec<String>,
}

/// Trains this rank's part of a run.
pub fn execute(args: &WorkerArgs) -> Outcome {
    let Some(config) = &args.config else { return session::train() };
    let spec = RunSpec::load(config, &args.overrides)?;
    solo::train(
        &spec,
        PolicyTrainer::<Flex>::new(TrainerOptions { device: Default::default(), listener: None }),
    )
}
