//! `cox export`: what a user takes away, of any checkpoint of a run.

use std::path::PathBuf;

use clap::Args;
use coxswain_proto::ids::Step;
use coxswain_worker::train::{ExportJob, WhichCheckpoint, check_writable};

use crate::{
    commands::spec_args::of_run,
    exit::{CliError, Outcome},
    render::say,
    tasks::tasks,
};

/// Flags of `cox export`.
#[derive(Args, Debug)]
pub struct ExportArgs {
    /// Output directory of a run
    #[arg(value_name = "RUN_DIR")]
    run_dir: PathBuf,
    /// Overrides of the run as it was trained, such as model.path=... if the model has moved
    #[arg(value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// Checkpoint to export: a step, 0 for the weights before training, or `best` [default: the last]
    #[arg(long, value_name = "N|best", value_parser = which)]
    step: Option<WhichCheckpoint>,
    /// Also write the pretrained model with the adapter merged, for programs without adapter support
    #[arg(long)]
    merged: bool,
    /// Write only a policy directory that LeRobot loads, in the base policy's dtypes
    #[arg(long, value_name = "DIR", conflicts_with_all = ["merged", "out"])]
    lerobot: Option<PathBuf>,
    /// Export the weights' moving average (optimizer.ema_decay)
    #[arg(long)]
    ema: bool,
    /// Output directory [default: export/step-N in the run's directory, export/step-N-ema for --ema]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

/// Writes it.
pub fn execute(args: &ExportArgs) -> Outcome {
    let spec = of_run(&args.run_dir, &args.overrides)?;
    let place = args.out.as_ref().or(args.lerobot.as_ref()).unwrap_or(&args.run_dir);
    check_writable(place).map_err(|error| {
        let place = place.display();
        CliError::usage(format_args!("{place}: cannot be written: {error}; name another one with --out"))
    })?;
    let which = args.step.unwrap_or_default();
    let (out, lerobot) = (args.out.clone(), args.lerobot.clone());
    let job = ExportJob { which, out, ema: args.ema, merged: args.merged, lerobot };
    let exported = tasks().export(&spec, &job)?;
    let rounding = exported.rounding.map_or_else(String::new, |cost| format!(" ({cost})"));
    say(format_args!("step {}: written to {}{rounding}", exported.step, exported.dir.display()));
    if let Some(merged) = exported.merged {
        say(format_args!("with the pretrained model merged: {}", merged.display()));
    }
    Ok(())
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
