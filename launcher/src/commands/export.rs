//! `cox export`: what a user takes away, of any checkpoint of a run.

use std::path::PathBuf;

use clap::Args;
use coxswain_proto::ids::Step;
use coxswain_worker::train::{ExportJob, WhichCheckpoint};

use crate::{
    commands::spec_args::of_run,
    exit::{Failed, Outcome},
    render::say,
    tasks::tasks,
};

/// Flags of `cox export`.
#[derive(Args, Debug)]
pub struct ExportArgs {
    /// Output directory of a run
    #[arg(value_name = "RUN_DIR")]
    run_dir: PathBuf,
    /// Changes to the run as it was trained: model.path=... at another place
    #[arg(value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// Which checkpoint: its step, 0 for what training began with, or `best` [default: the last]
    #[arg(long, value_name = "N|best", value_parser = which)]
    step: Option<WhichCheckpoint>,
    /// Also write the pretrained model with the adapter merged in, for programs that know no adapters
    #[arg(long)]
    merged: bool,
    /// The average of the weights (optimizer.ema_decay) instead of the weights
    #[arg(long)]
    ema: bool,
    /// Where to write [default: export/step-N in the run's directory, export/step-N-ema for --ema]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

/// Writes it.
pub fn execute(args: &ExportArgs) -> Outcome {
    let spec = of_run(&args.run_dir, &args.overrides)?;
    let which = args.step.unwrap_or_default();
    let job = ExportJob { which, out: args.out.clone(), ema: args.ema, merged: args.merged };
    let exported = tasks().export(&spec, &job)?;
    say(format_args!("step {}: written to {}", exported.step, exported.dir.display()));
    match exported.merged {
        Some(merged) => {
            say(format_args!("with the pretrained model merged: {}", merged.display()));
            Ok(())
        }
        None if args.merged => {
            Err(Failed::usage("--merged: this run has no adapter, or its task writes no merged model"))
        }
        None => Ok(()),
    }
}

fn which(text: &str) -> Result<WhichCheckpoint, String> {
    match text {
        "best" => Ok(WhichCheckpoint::Best),
        number => number
            .parse()
            .map(|step| WhichCheckpoint::Of(Step(step)))
            .map_err(|_| "expected a step, or `best`".to_owned()),
    }
}
