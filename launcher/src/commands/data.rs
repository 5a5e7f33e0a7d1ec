//! `cox data`: what is in a data set, and what training makes of it.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use coxswain_worker::data;

use super::SpecArgs;
use crate::{
    exit::{Exit, Failed, Outcome},
    render::say,
};

/// Subcommands of `cox data`.
#[derive(Debug, Subcommand)]
pub enum DataCommand {
    /// Describe a LeRobot data set: episodes, features, shapes, statistics, and what a run file could name
    Inspect(InspectArgs),
    /// Write one sample as training sees it to a safetensors file
    Sample(SampleArgs),
}

/// Flags of `cox data inspect`.
#[derive(Args, Debug)]
pub struct InspectArgs {
    /// Directory of the data set
    #[arg(value_name = "DIR")]
    dir: PathBuf,
    /// One JSON object instead of text
    #[arg(long)]
    json: bool,
}

/// Flags of `cox data sample`.
#[derive(Args, Debug)]
pub struct SampleArgs {
    #[command(flatten)]
    spec: SpecArgs,
    /// The sample's number: its frame, counted over all episodes
    #[arg(long, value_name = "I")]
    index: u64,
    /// Where to write it
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
}

/// Runs one of them.
pub fn execute(command: &DataCommand) -> Outcome {
    let bad = |error: data::DataError| Failed::new(Exit::BadInput, error);
    match command {
        DataCommand::Inspect(args) => {
            let report = data::inspect(&args.dir).map_err(bad)?;
            match args.json {
                true => say(serde_json::json!(report)),
                false => say(report),
            };
        }
        DataCommand::Sample(args) => {
            let spec = args.spec.load()?;
            data::write_sample(&spec, args.index, &args.out).map_err(bad)?;
            say(format_args!("sample {} written to {}", args.index, args.out.display()));
        }
    }
    Ok(())
}
