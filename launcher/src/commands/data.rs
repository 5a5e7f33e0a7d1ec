//! `cox data`: what is in a data set, and what training makes of it.

mod check;
mod preview;
mod progress;
mod stats;

use std::path::PathBuf;

use clap::{Args, Subcommand};
use coxswain_data as data;
use coxswain_proto::human;
use coxswain_task::RandomJob;

use super::spec_args::SpecArgs;
use crate::{
    exit::{CliError, Outcome},
    render::say,
    tasks::tasks,
};

/// Subcommands of `cox data`.
#[derive(Debug, Subcommand)]
pub enum DataCommand {
    /// Describe a LeRobot data set: episodes, features, shapes, statistics, and what a run file could name
    Inspect(InspectArgs),
    /// Find faults of a LeRobot data set: rows, timestamps, values, images, statistics, files
    Check(check::DataCheckArgs),
    /// Compute missing statistics of a data set
    Stats(stats::StatsArgs),
    /// Draw an episode as a PNG: a film strip for each camera, plots of state and action
    Preview(preview::PreviewArgs),
    /// Write one sample to a safetensors file, as training sees it
    Sample(SampleArgs),
    /// Write a checkpoint with a model's exact shapes and random weights, to measure speed and memory
    MakeCheckpoint(MakeCheckpointArgs),
}

/// Flags of `cox data inspect`.
#[derive(Args, Debug)]
pub struct InspectArgs {
    /// Directory of the data set
    #[arg(value_name = "DIR")]
    dir: PathBuf,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

/// Flags of `cox data sample`.
#[derive(Args, Debug)]
pub struct SampleArgs {
    #[command(flatten)]
    spec: SpecArgs,
    /// Index of the sample: its frame, counted over all episodes
    #[arg(long, value_name = "I")]
    index: u64,
    /// File to write
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
}

/// Flags of `cox data make-checkpoint`.
#[derive(Args, Debug)]
pub struct MakeCheckpointArgs {
    /// Directory whose config.json gives the shapes; its tokenizer and preprocessor are copied
    #[arg(long, value_name = "DIR")]
    like: PathBuf,
    /// Directory of another tokenizer; config.json gets its special token ids
    #[arg(long, value_name = "DIR")]
    tokenizer: Option<PathBuf>,
    /// Directory to create
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Type of the weights in the files
    #[arg(long, value_enum, value_name = "TYPE", default_value_t = Dtype::Bf16)]
    dtype: Dtype,
    /// Seed of the random weights
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
}

/// Types of weights.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum Dtype {
    /// bfloat16, 2 bytes.
    Bf16,
    /// float32, 4 bytes.
    F32,
}

/// Runs one of them.
pub fn execute(command: &DataCommand) -> Outcome {
    match command {
        DataCommand::Inspect(args) => {
            let report = data::inspect(&args.dir).map_err(CliError::bad_input)?;
            match args.json {
                true => {
                    say(serde_json::json!(report));
                }
                false => {
                    let keys = tasks().cpu.first().map_or(&[][..], |task| task.data_keys());
                    say(format_args!("{report}\nIn a run file:\n\n{}", report.run_section(keys)));
                }
            };
        }
        DataCommand::Check(args) => check::execute(args)?,
        DataCommand::Stats(args) => stats::execute(args)?,
        DataCommand::Preview(args) => preview::execute(args)?,
        DataCommand::Sample(args) => {
            let spec = args.spec.load()?;
            let task = tasks().of(&spec).map_err(CliError::bad_input)?;
            task.write_sample(&spec, args.index, &args.out).map_err(CliError::bad_input)?;
            say(format_args!("sample {} written to {}", args.index, args.out.display()));
        }
        DataCommand::MakeCheckpoint(args) => {
            let job = RandomJob {
                like: &args.like,
                tokenizer: args.tokenizer.as_deref(),
                out: &args.out,
                bfloat16: matches!(args.dtype, Dtype::Bf16),
                seed: args.seed,
            };
            let made = tasks().cpu.iter().find_map(|task| task.make_checkpoint(&job)).ok_or_else(|| {
                CliError::usage(format!("{}: no task trains a model like this", args.like.display()))
            })?;
            let made = made.map_err(CliError::bad_input)?;
            say(format_args!(
                "{}: {} parameters in {} tensors, {} in {} file{}",
                args.out.display(),
                made.parameters,
                made.tensors,
                human::bytes(made.bytes),
                made.shards,
                if made.shards == 1 { "" } else { "s" }
            ));
        }
    }
    Ok(())
}
