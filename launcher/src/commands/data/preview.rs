//! `cox data preview`: an episode as one picture.

use std::path::PathBuf;

use clap::Args;
use coxswain_data::place;
use coxswain_survey::{episode, sheet};

use crate::{
    commands::spec_args::SpecArgs,
    exit::{CliError, Outcome},
    render::say,
    tasks::tasks,
};

/// Flags of `cox data preview`.
#[derive(Args, Debug)]
pub struct PreviewArgs {
    /// Directory of a data set (shown as recorded) or a run file (shown as training sees it)
    #[arg(value_name = "DIR|CONFIG")]
    of: PathBuf,
    /// Overrides of the run file: section.key=value
    #[arg(value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// Episode to draw
    #[arg(long, value_name = "N", default_value_t = 0)]
    episode: u64,
    /// Number of frames, evenly spaced
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=64))]
    frames: u16,
    /// PNG file to write
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
}

/// Draws and writes.
pub fn execute(args: &PreviewArgs) -> Outcome {
    let frames = usize::from(args.frames);
    let preview = if args.of.is_dir() || place::is_remote(&args.of) {
        episode(&args.of, args.episode, frames).map_err(CliError::bad_input)?
    } else {
        let (config, overrides) = (args.of.clone(), args.overrides.clone());
        // A section is chosen by `section=NAME` among the overrides.
        let spec = SpecArgs { config, overrides, section: None, auto_batch_size: false }.load()?;
        let task = tasks().of(&spec).map_err(CliError::bad_input)?;
        let preview = task.preview(&spec, args.episode, frames).ok_or_else(|| {
            CliError::usage(format_args!(
                "{}: nothing to preview: samples of task {} have no episodes",
                args.of.display(),
                task.name()
            ))
        })?;
        preview.map_err(CliError::bad_input)?
    };
    let unwritten = |error| CliError::usage(format_args!("{}: cannot write: {error}", args.out.display()));
    std::fs::write(&args.out, sheet(&preview)).map_err(unwritten)?;
    say(format_args!("{}: {}", args.out.display(), preview.title));
    Ok(())
}
