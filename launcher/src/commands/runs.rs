//! `cox runs` and `cox diff`: what ran below a directory, and what two runs differ in.

use std::path::{Path, PathBuf};

use clap::Args;
use serde_json::{Value, json};

use super::{runtime::block_on, spec_args::no_run};
use crate::{
    endpoint,
    exit::{CliError, Exit, Outcome},
    render::{runs as render, say},
    report::Story,
    run_dir::RunDir,
};

/// Flags of `cox runs`.
#[derive(Args, Debug)]
pub struct RunsArgs {
    /// Directory that holds the runs' directories
    #[arg(value_name = "DIR", default_value = endpoint::RUNS)]
    runs: PathBuf,
    /// Print one JSON array
    #[arg(long)]
    json: bool,
}

/// Flags of `cox diff`.
#[derive(Args, Debug)]
pub struct DiffArgs {
    /// Output directory of a run
    #[arg(value_name = "RUN_DIR")]
    first: PathBuf,
    /// Output directory of the other run
    #[arg(value_name = "OTHER_RUN_DIR")]
    second: PathBuf,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Lists runs, the newest last.
pub fn list(args: &RunsArgs) -> Outcome {
    let unreadable = |error| CliError::usage(format!("{}: {error}", args.runs.display()));
    let entries = std::fs::read_dir(&args.runs).map_err(unreadable)?;
    let below = entries.flatten().map(|entry| entry.path());
    let began = |dir: &PathBuf| std::fs::metadata(dir.join("run.json")).and_then(|file| file.modified()).ok();
    // A run's own directory is a list of one.
    let mut dirs: Vec<_> = below.chain([args.runs.clone()]).filter(|dir| RunDir::is_run(dir)).collect();
    dirs.sort_by_cached_key(|dir| (began(dir), dir.clone()));
    let listed = |dir: &PathBuf| render::RunEntry {
        run: block_on(RunDir::read(dir)),
        opening: Story::opening(&dir.join("logs/coordinator.log")),
    };
    let runs: Vec<_> = dirs.iter().map(listed).collect();
    match args.json {
        true => say(Value::from_iter(runs.iter().map(render::json))),
        false => say(render::list(&args.runs, &runs)),
    };
    Ok(())
}

/// Compares two runs: program, data set, every key of the run file, results.
pub fn diff(args: &DiffArgs) -> Outcome {
    for dir in [&args.first, &args.second] {
        if !RunDir::is_run(dir) {
            return Err(no_run(dir, Path::new("run.json")));
        }
    }
    let [first, second] = [&args.first, &args.second].map(|dir| block_on(RunDir::read(dir)));
    if let Some(problem) = [&first, &second].into_iter().flat_map(RunDir::damage).next() {
        return Err(CliError::new(Exit::BadInput, problem));
    }
    let differences = render::differences(&first, &second);
    match args.json {
        true => {
            let named = differences.iter().map(|(key, one, other)| (key.clone(), json!([one, other])));
            say(Value::Object(named.collect()))
        }
        false => say(render::diff(&first, &second, &differences)),
    };
    Ok(())
}
