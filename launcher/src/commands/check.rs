//! `cox check`: everything that can be known before training. Reads the model, the data and the checkpoints;
//! writes nothing.

use clap::Args;
use coxswain_worker::train;

use super::spec_args::SpecArgs;
use crate::{
    bucket,
    exit::{Exit, Failed, Outcome},
    plan::check::{Forecast, refuse_float16_on_cpu},
    render::say,
    tasks::tasks,
};

/// Flags of `cox check`.
#[derive(Args, Debug)]
pub struct CheckArgs {
    #[command(flatten)]
    spec: SpecArgs,
    /// One JSON object instead of text
    #[arg(long)]
    json: bool,
}

/// Checks a run and shows what it would be.
pub fn execute(args: &CheckArgs) -> Outcome {
    let spec = args.spec.load_to_launch()?;
    if let Some(place) = bucket::BucketPlace::look(&spec)? {
        place.check(&spec)?;
    }
    let task = tasks().of(&spec).map_err(|unknown| Failed::new(Exit::BadInput, unknown))?;
    refuse_float16_on_cpu(&spec, spec.launch.device)?;
    let report = train::check(task, &spec, &Default::default())?;
    let ranks = spec.launch.nproc_per_node.unwrap_or(1) as u64;
    match Forecast::of(&spec, spec.launch.device, ranks, ranks)?.shortfall {
        Some(shortfall) if shortfall.bound.is_some() => return Err(shortfall.refusal()),
        Some(shortfall) => tracing::warn!("{shortfall}"),
        None => {}
    }
    match args.json {
        true => say(serde_json::json!({"run": spec.run.name, "report": report})),
        false => {
            say(format_args!("{}: run {} can start\n{report}", args.spec.config.display(), spec.run.name))
        }
    };
    Ok(())
}
