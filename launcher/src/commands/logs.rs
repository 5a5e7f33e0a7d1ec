//! `cox logs`: a log of a run, from its files, as it grows.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use clap::Args;

use crate::{
    endpoint,
    exit::{CliError, Outcome},
    log_tail::LogTail,
    render::say,
    run_dir::RunDir,
};

/// Flags of `cox logs`.
#[derive(Args, Debug)]
pub struct LogsArgs {
    /// Output directory of the run [default: the newest active one below runs/]
    #[arg(value_name = "RUN_DIR")]
    run: Option<PathBuf>,
    /// Show this rank's log instead of the coordinator's
    #[arg(long, value_name = "N")]
    rank: Option<u32>,
    /// Show the rank's standard output instead of its standard error
    #[arg(long, requires = "rank")]
    stdout: bool,
    /// Show only the last N lines
    #[arg(short = 'n', long, value_name = "N")]
    lines: Option<usize>,
    /// Follow the log until the run ends
    #[arg(short, long)]
    follow: bool,
}

/// Between two looks at a file that has not grown.
const LOOK: Duration = Duration::from_millis(200);

/// Shows a log.
pub fn execute(args: &LogsArgs) -> Outcome {
    let run = match &args.run {
        Some(run) => run.clone(),
        None => endpoint::active(Path::new(endpoint::RUNS))?.pop().unwrap_or_default(),
    };
    if !RunDir::is_run(&run) {
        let problem = format!("{}: not the output directory of a run (there is no run.json)", run.display());
        return Err(CliError::usage(problem));
    }
    let mut log = LogTail::new(path(&run, args)?);
    let unreadable = |error: std::io::Error, log: &LogTail| {
        CliError::usage(format!("{}: {error}{}", log.path().display(), there_are(&run)))
    };
    let mut last = Vec::new();
    loop {
        let lines = log.lines().map_err(|error| unreadable(error, &log))?;
        if lines.is_empty() {
            break;
        }
        last.extend(lines);
        // What is shown whole need not be kept.
        let kept = args.lines.unwrap_or(0);
        let surplus = last.len().saturating_sub(kept);
        let told: Vec<_> = last.drain(..surplus).collect();
        if args.lines.is_none() && !told.iter().all(say) {
            return Ok(());
        }
    }
    if !last.iter().all(say) {
        return Ok(());
    }
    while args.follow && endpoint::is_active(&run) {
        std::thread::sleep(LOOK);
        let lines = log.lines().map_err(|error| unreadable(error, &log))?;
        if !lines.iter().all(say) {
            return Ok(());
        }
    }
    // Written between the last look and the end, or cut in half.
    let _shown = log.lines().unwrap_or_default().into_iter().chain(log.rest()).all(say);
    Ok(())
}

fn path(run: &Path, args: &LogsArgs) -> Result<PathBuf, CliError> {
    let logs = run.join("logs");
    let Some(rank) = args.rank else { return Ok(logs.join("coordinator.log")) };
    let name = if args.stdout { "stdout.log" } else { "stderr.log" };
    let path = logs.join(format!("rank{rank:04}")).join(name);
    match path.is_file() {
        true => Ok(path),
        false => Err(CliError::usage(format!("{}: there is no such log{}", path.display(), there_are(run)))),
    }
}

/// Which ranks have logs; `--log-dir` may have put them elsewhere.
fn there_are(run: &Path) -> String {
    let entries = fs::read_dir(run.join("logs")).into_iter().flatten().flatten();
    let rank = |name: &str| name.strip_prefix("rank")?.parse::<u32>().ok();
    let mut ranks: Vec<_> = entries.filter_map(|entry| rank(entry.file_name().to_str()?)).collect();
    ranks.sort_unstable();
    match (ranks.first(), ranks.last()) {
        (Some(first), Some(last)) => format!("; there are logs of ranks {first} to {last}"),
        _ => "; a run with --log-dir has its ranks' logs in that directory".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_that_is_not_there_is_an_error_that_names_those_that_are() {
        let dir = tempfile::tempdir().unwrap();
        let args = |rank| LogsArgs {
            run: Some(dir.path().to_owned()),
            rank,
            stdout: false,
            lines: None,
            follow: true,
        };
        let problem = |rank| execute(&args(rank)).unwrap_err().message.unwrap();
        assert!(problem(None).contains("there is no run.json"), "{}", problem(None));
        fs::write(dir.path().join("run.json"), "{}").unwrap();
        assert!(problem(None).contains("coordinator.log"), "{}", problem(None));
        fs::create_dir_all(dir.path().join("logs/rank0001")).unwrap();
        fs::create_dir_all(dir.path().join("logs/rank0004")).unwrap();
        let missing = problem(Some(3));
        assert!(missing.contains("rank0003/stderr.log") && missing.ends_with("ranks 1 to 4"), "{missing}");
        fs::write(dir.path().join("logs/rank0004/stderr.log"), "one\ntw").unwrap();
        execute(&args(Some(4))).unwrap();
    }
}
