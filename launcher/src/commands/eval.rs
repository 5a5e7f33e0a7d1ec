//! `cox eval`: a task's measures on samples that training never saw.

use std::path::PathBuf;

use clap::Args;
use coxswain_proto::run_spec::DeviceChoice;

use crate::{
    commands::spec_args::of_run,
    exit::{CliError, Outcome},
    render::say,
    tasks::{chosen_device, tasks},
};

/// Flags of `cox eval`.
#[derive(Args, Debug)]
pub struct EvalArgs {
    /// Output directory of a run
    #[arg(value_name = "RUN_DIR")]
    run_dir: PathBuf,
    /// Overrides of the run as it was trained, such as data.path=... if the data have moved, or
    /// eval.samples=N
    #[arg(value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// Evaluate the weights' moving average (optimizer.ema_decay)
    #[arg(long)]
    ema: bool,
    /// Device: auto, cpu or cuda [default: launch.device]
    #[arg(long, value_name = "auto|cpu|cuda")]
    device: Option<DeviceChoice>,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

/// Evaluates the newest checkpoint.
pub fn execute(args: &EvalArgs) -> Outcome {
    let spec = of_run(&args.run_dir, &args.overrides)?;
    let device = chosen_device(args.device.unwrap_or(spec.launch.device))?;
    let (step, error) = tasks().evaluate(&spec, device, args.ema)?;
    let Some(error) = error else {
        return Err(CliError::usage(
            "no held-out samples to evaluate on: hold samples out (data.holdout_episodes, or your task's own key), and set eval.samples to at least 1",
        ));
    };
    match args.json {
        true => say(serde_json::json!({"step": step, "ema": args.ema, "held_out": error})),
        false => {
            let measures = error.measures.iter().map(|(name, value)| format!("{name} {value:.4}"));
            let measures = measures.collect::<Vec<_>>().join(", ");
            let what = if args.ema { " (averaged weights)" } else { "" };
            let of_set = |(set, measures): (&str, String)| format!("\n  {set}: {measures}");
            let of_sets: String = error.by_set().into_iter().map(of_set).collect();
            say(format_args!("step {step}{what}, {} held-out samples: {measures}{of_sets}", error.samples))
        }
    };
    Ok(())
}
