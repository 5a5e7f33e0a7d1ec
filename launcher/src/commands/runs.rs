//! `cox runs` and `cox diff`: what ran below a directory, and what two runs differ in.

use std::path::PathBuf;

use clap::Args;
use serde_json::{Value, json};

use super::runtime::block_on;
use crate::{
    endpoint,
    exit::{Failed, Outcome},
    render::{runs as render, say},
    report::Story,
    run_dir::RunDir,
};

/// Flags of `cox runs`.
#[derive(Args, Debug)]
pub struct RunsArgs {
    /// Directory whose subdirectories are runs
    #[arg(value_name = "DIR", default_value = endpoint::RUNS)]
    runs: PathBuf,
    /// One JSON array
    #[arg(long)]
    json: bool,
}

/// Flags of `cox diff`.
#[derive(Args, Debug)]
pub struct DiffArgs {
    /// Output directory of a run
    #[arg(value_name = "RUN_DIR")]
    first: PathBuf,
    /// Output directory of another one
    #[arg(value_name = "OTHER_RUN_DIR")]
    second: PathBuf,
    /// One JSON object
    #[arg(long)]
    json: bool,
}

/// Lists runs, the newest last.
pub fn list(args: &RunsArgs) -> Outcome {
    let unreadable = |error| Failed::usage(format!("{}: {error}", args.runs.display()));
    let entries = std::fs::read_dir(&args.runs).map_err(unreadable)?;
    let began = |dir: &PathBuf| std::fs::metadata(dir.join("run.json")).and_then(|file| file.modified()).ok();
    let mut dirs: Vec<_> =
        entries.flatten().map(|entry| entry.path()).filter(|dir| RunDir::is_run(dir)).collect();
    dirs.sort_by_cached_key(|dir| (began(dir), dir.clone()));
    let listed = |dir: &PathBuf| render::Listed {
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
            let problem =
                format!("{}: not the output directory of a run (there is no run.json)", dir.display());
            return Err(Failed::usage(problem));
        }
    }
    let [first, second] = [&args.first, &args.second].map(|dir| block_on(RunDir::read(dir)));
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
