//! `cox report`: runs as one page that opens anywhere.

use std::{
    fs,
    path::{Path, PathBuf},
};

use clap::Args;

use super::runtime::block_on;
use crate::{
    exit::{Exit, Failed, Outcome},
    render::say,
    report::{ReportedRun, page},
    run_dir::RunDir,
};

/// Flags of `cox report`.
#[derive(Args, Debug)]
pub struct ReportArgs {
    /// Output directories of runs, going on or over; several are compared
    #[arg(value_name = "RUN_DIR", required = true)]
    runs: Vec<PathBuf>,
    /// The page [default: report.html in the directory of the first run]
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

/// Below a run's directory.
pub const PAGE: &str = "report.html";

/// Writes the page and says where it is.
pub fn execute(args: &ReportArgs) -> Outcome {
    if let Some(stranger) = args.runs.iter().find(|dir| !RunDir::is_run(dir)) {
        let problem =
            format!("{}: not the output directory of a run (there is no run.json)", stranger.display());
        return Err(Failed::usage(problem));
    }
    let first = args.runs.first().map(|run| run.join(PAGE));
    let Some(out) = args.out.clone().or(first) else { return Ok(()) };
    let runs: Vec<_> = args.runs.iter().map(|dir| block_on(ReportedRun::read(dir))).collect();
    write(&out, &page(&runs)).map_err(|problem| Failed::new(Exit::Usage, problem))?;
    for problem in runs.iter().flat_map(|run| &run.problems) {
        tracing::warn!("{problem}");
    }
    say(out.display());
    Ok(())
}

/// Writes the page of a run that has ended into its directory; where it is.
pub(super) fn leave(run: &Path) -> Result<PathBuf, String> {
    let out = run.join(PAGE);
    let read = block_on(ReportedRun::read(run));
    write(&out, &page(&[read]))?;
    Ok(out)
}

/// By rename: a reader has the page before or this one.
fn write(out: &Path, page: &str) -> Result<(), String> {
    let mut name = out.file_name().unwrap_or_default().to_owned();
    name.push(".tmp");
    let staged = out.with_file_name(name);
    let written = fs::write(&staged, page).and_then(|()| fs::rename(&staged, out));
    written.map_err(|error| {
        let _ = fs::remove_file(&staged);
        format!("{}: cannot be written: {error}", out.display())
    })
}
