//! `cox eval`: how far a trained policy's actions are from recorded ones that it never saw.

use std::path::PathBuf;

use clap::Args;
use coxswain_proto::run_spec::{DeviceChoice, RunSpec};
use coxswain_worker::device;

use crate::{
    accelerator::accelerator,
    endpoint,
    exit::{Exit, Failed, Outcome},
    render::say,
};

/// Flags of `cox eval`.
#[derive(Args, Debug)]
pub struct EvalArgs {
    /// Output directory of a run
    #[arg(value_name = "RUN_DIR")]
    run_dir: PathBuf,
    /// Changes to the run as it was trained: eval.samples=0 looks at no sample, data.path=... at another place
    #[arg(value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// What to compute on: auto, cpu or cuda [default: launch.device]
    #[arg(long, value_name = "auto|cpu|cuda")]
    device: Option<DeviceChoice>,
    /// One JSON object instead of text
    #[arg(long)]
    json: bool,
}

/// Evaluates the newest checkpoint.
pub fn execute(args: &EvalArgs) -> Outcome {
    let file = args.run_dir.join(endpoint::SPEC_FILE);
    if !file.exists() {
        return Err(Failed::usage(format!(
            "{}: not the output directory of a run (there is no {})",
            args.run_dir.display(),
            file.display()
        )));
    }
    // The directory may have been moved since. JSON is YAML.
    let mut overrides = vec![format!("run.output_dir={}", serde_json::json!(args.run_dir))];
    overrides.extend(args.overrides.iter().cloned());
    let spec = RunSpec::load(&file, &overrides, coxswain_proto::vla_flow::TASKS)?;
    let wanted = args.device.unwrap_or(spec.launch.device);
    let device = device::choose(wanted, 0, accelerator())
        .map_err(|missing| Failed::usage(format!("device {wanted}: {missing}")))?;
    let (step, error) = device::evaluate(&spec, device, accelerator())?;
    let Some(error) = error else {
        return Err(Failed::new(
            Exit::Usage,
            "nothing to evaluate on: give data.holdout_episodes=[..] and eval.samples of at least 1",
        ));
    };
    match args.json {
        true => say(serde_json::json!({"step": step, "action_error": error})),
        false => say(format_args!(
            "step {step}: over {} held-out samples the actions are off by {:.4} (mean absolute, in the data's units; squared and \
             normalised {:.4})",
            error.samples, error.mae, error.mse_normalized
        )),
    };
    Ok(())
}
