//! `cox report`: runs as one page that opens anywhere.

use std::{
    fs,
    path::{Path, PathBuf},
};

use clap::Args;
use coxswain_coordinator::wandb_file::{self, RunLabel};
use coxswain_proto::in_place;

use super::{runtime::block_on, spec_args::no_run};
use crate::{
    exit::{CliError, Exit, Outcome},
    render::say,
    report::{ReportedRun, page},
    run_dir::RunDir,
};

/// Flags of `cox report`.
#[derive(Args, Debug)]
pub struct ReportArgs {
    /// Output directories of runs, active or finished; several are compared
    #[arg(value_name = "RUN_DIR", required = true)]
    runs: Vec<PathBuf>,
    /// File to write [default: report.html in the directory of the first run]
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Also write each run as an offline run of Weights & Biases, and print how to upload it
    #[arg(long)]
    wandb: bool,
}

/// Below a run's directory.
pub const PAGE: &str = "report.html";

/// Writes the page and says where it is.
pub fn execute(args: &ReportArgs) -> Outcome {
    if let Some(stranger) = args.runs.iter().find(|dir| !RunDir::is_run(dir)) {
        return Err(no_run(stranger, Path::new("run.json")));
    }
    let first = args.runs.first().map(|run| run.join(PAGE));
    let Some(out) = args.out.clone().or(first) else { return Ok(()) };
    let runs: Vec<_> = args.runs.iter().map(|dir| block_on(ReportedRun::read(dir))).collect();
    write(&out, page(&runs)).map_err(|problem| CliError::new(Exit::Usage, problem))?;
    for problem in runs.iter().flat_map(|run| &run.problems) {
        tracing::warn!("{problem}");
    }
    say(out.display());
    for run in runs.iter().filter(|_| args.wandb) {
        let dir = offline_run(run).map_err(|problem| CliError::new(Exit::Usage, problem))?;
        say(format_args!("wandb sync {}", dir.display()));
    }
    Ok(())
}

/// Writes a run's scalars and run file as `wandb` finds them below its directory; where.
fn offline_run(run: &ReportedRun) -> Result<PathBuf, String> {
    let text = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_owned();
    let (id, name) = (text(&run.dir.run["run_id"]), run.name());
    let is_of_id = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    let id: String = id.chars().map(|c| if is_of_id(c) { c } else { '-' }).take(64).collect();
    let points = run.scalars.series.values().flatten();
    let begin = points.map(|point| point.unix_seconds).fold(f64::INFINITY, f64::min);
    let begin = if begin.is_finite() { begin as i64 } else { 0 };
    let begin = jiff::Timestamp::from_second(begin).unwrap_or_default();
    let dir = run.dir.dir.join(format!("wandb/offline-run-{}-{id}", begin.strftime("%Y%m%d_%H%M%S")));
    let finished = run.records().is_some_and(|records| records.finished);
    let exit_code = i32::from(!finished);
    let label = RunLabel { id: &id, project: "coxswain", name: &name, config: &run.dir.spec, exit_code };
    let file = dir.join(format!("run-{id}.wandb"));
    fs::create_dir_all(&dir).map_err(|error| format!("{}: {error}", dir.display()))?;
    write(&file, wandb_file::encode(&label, &run.scalars))?;
    Ok(dir)
}

/// Writes the page of a run that has ended into its directory; where it is.
pub(super) fn leave(run: &Path) -> Result<PathBuf, String> {
    let out = run.join(PAGE);
    let read = block_on(ReportedRun::read(run));
    write(&out, page(&[read]))?;
    Ok(out)
}

/// By rename: a reader has the page before or this one.
pub(super) fn write(out: &Path, content: impl AsRef<[u8]>) -> Result<(), String> {
    in_place::replace(out, content.as_ref())
        .map_err(|error| format!("{}: cannot be written: {error}", out.display()))
}
