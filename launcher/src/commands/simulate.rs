//! `cox simulate`: what a fault script costs, without a GPU and in no time.

use std::path::PathBuf;

use clap::Args;
use coxswain_simulator::{play, script::Script};

use crate::{
    exit::{CliError, Exit, Outcome},
    render::say,
};

/// Flags of `cox simulate`.
#[derive(Args, Debug)]
pub struct SimulateArgs {
    /// Fault script (YAML); examples are in configs/faults
    #[arg(value_name = "FAULTS", required_unless_present = "seed")]
    script: Option<PathBuf>,
    /// Seed instead of the script's; without a script, the run and its faults are drawn from it
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Also print joins, losses and phases of the run
    #[arg(long)]
    verbose: bool,
}

/// Plays the script and prints what happened.
pub fn execute(args: &SimulateArgs) -> Outcome {
    let mut script = match &args.script {
        Some(path) => {
            let script = Script::load(path).map_err(CliError::usage)?;
            Script { seed: args.seed.unwrap_or(script.seed), ..script }
        }
        None => Script::drawn(args.seed.unwrap_or_default()),
    };
    script.verbose = args.verbose;
    let report = play(&script);
    say(report.to_string());
    match report.violations.is_empty() {
        true => Ok(()),
        false => Err(CliError::new(Exit::Internal, "the simulated run violated an invariant")),
    }
}
