//! `cox check`: everything that can be known before training. Reads the model, the data and the checkpoints;
//! writes nothing.

use clap::Args;
use coxswain_proto::run_spec::Recompute;
use coxswain_worker::train;

use super::{acceptance, spec_args::SpecArgs};
use crate::{
    bucket::BucketPlace,
    exit::{CliError, Outcome},
    launch::{
        flags::LaunchFlags,
        inputs::process_env,
        machine::LocalMachine,
        plan::{Plan, Sources},
    },
    render::say,
    tasks::{accelerator, tasks},
};

/// Flags of `cox check`.
#[derive(Args, Debug)]
pub struct CheckArgs {
    #[command(flatten)]
    spec: SpecArgs,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

/// Checks a run and shows what it would be.
pub fn execute(args: &CheckArgs) -> Outcome {
    let spec = args.spec.load_to_launch()?;
    let plan = Plan::resolve(&Sources {
        flags: &LaunchFlags::default(),
        env: &process_env,
        spec: &spec,
        machine: &LocalMachine::this(),
        gpus: &|| accelerator().probe().map(|gpus| gpus.count),
    })?;
    let place = BucketPlace::look(&spec)?;
    let accepted = acceptance::accept(&spec, &plan, place.as_ref(), false)?;
    accepted.warn();
    let task = tasks().of(&spec).map_err(CliError::bad_input)?;
    // Each memory has its own, where the run leaves it to them.
    let auto = spec.train.recompute == Recompute::Auto;
    let outlooks = accepted.outline.iter().flat_map(|outline| &outline.forecast.outlooks);
    let modes: String = outlooks
        .filter(|_| auto)
        .map(|outlook| format!("\nrecompute {} in {} (auto)", outlook.recompute, outlook.memory.name))
        .collect();
    let report = train::check(task, &spec, &Default::default(), accepted.resumes_at)?;
    match args.json {
        true => say(serde_json::json!({"run": spec.run.name, "report": report})),
        false => say(format_args!(
            "{}: run {} can start\n{report}{modes}",
            args.spec.config.display(),
            spec.run.name
        )),
    };
    Ok(())
}
