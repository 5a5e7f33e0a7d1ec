//! `cox data stats`: statistics that a data set lacks.

use std::path::PathBuf;

use clap::Args;
use coxswain_survey::{Job, MissingStats, StatsOutcome, fill};

use super::progress::Progress;
use crate::{
    exit::{CliError, Exit, Outcome},
    render::say,
};

/// Flags of `cox data stats`.
#[derive(Args, Debug)]
pub struct StatsArgs {
    /// Directory of the data set
    #[arg(value_name = "DIR")]
    dir: PathBuf,
    /// Recompute existing statistics too
    #[arg(long)]
    anew: bool,
    /// Overwrite the data set's own file instead of writing a new one next to it
    #[arg(long)]
    force: bool,
}

/// Computes, writes, and says what.
pub fn execute(args: &StatsArgs) -> Outcome {
    let bar = Progress::new("episodes");
    let progress = |done, all| bar.show(done, all);
    let job = Job { dir: &args.dir, anew: args.anew, force: args.force, progress: &progress };
    let filled = fill(&job).map_err(|error| CliError::new(Exit::BadInput, error))?;
    drop(bar);
    let Some(StatsOutcome { path, beside, computed }) = filled else {
        say(format_args!("{}: nothing to do: every statistic exists", args.dir.display()));
        return Ok(());
    };
    for MissingStats { feature, statistics } in &computed {
        say(format_args!("  {feature}: {}", statistics.join(", ")));
    }
    match beside {
        None => say(format_args!("written to {}", path.display())),
        Some(own) => say(format_args!(
            "written to {}; {} is unchanged: `--force` replaces it",
            path.display(),
            own.display()
        )),
    };
    Ok(())
}
