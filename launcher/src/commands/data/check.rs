//! `cox data check`: what is wrong with a data set, before a run finds out.

use std::path::PathBuf;

use clap::Args;
use coxswain_survey::{Frames, Severity, check};

use super::progress::Episodes;
use crate::{
    exit::{Exit, Failed, Outcome},
    render::{findings, say},
};

/// Flags of `cox data check`.
#[derive(Args, Debug)]
pub struct DataCheckArgs {
    /// Directory of the data set
    #[arg(value_name = "DIR")]
    dir: PathBuf,
    /// Decode every picture, not three of each episode
    #[arg(long)]
    every_frame: bool,
    /// Fail for warnings, too
    #[arg(long)]
    strict: bool,
    /// One JSON object instead of text
    #[arg(long)]
    json: bool,
}

/// Checks, shows, and fails if something is wrong.
pub fn execute(args: &DataCheckArgs) -> Outcome {
    let bar = Episodes::new();
    let frames = if args.every_frame { Frames::Every } else { Frames::Few };
    let report = check(&args.dir, frames, &|done, all| bar.show(done, all));
    drop(bar);
    match args.json {
        true => say(serde_json::json!(report)),
        false => say(findings::text(&report)),
    };
    let is_bad = report.count(Severity::Error) > 0 || (args.strict && !report.findings.is_empty());
    if is_bad { Err(Failed::silent(Exit::BadInput)) } else { Ok(()) }
}
