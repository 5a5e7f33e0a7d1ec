//! The subcommands, one file each.

use clap::{CommandFactory, Parser, Subcommand};

use crate::{
    exit::Outcome,
    supervise::console::LogWriter,
    telemetry::{self, Destination},
};

mod acceptance;
mod audit;
mod cache;
mod check;
mod control;
mod coordinator;
mod data;
mod ending;
mod eval;
mod export;
mod generate;
mod gpu;
mod init;
mod logs;
mod model;
mod plan;
mod profile;
mod rebuild_cache;
mod report;
mod run;
mod runs;
mod runtime;
mod selftest;
mod serve;
mod shell;
mod simulate;
mod spec_args;
mod status;
mod token;
mod top;
mod watch;
mod worker;

/// What `--version` says: the version, and what decides what this build can do and how fast.
const BUILT: &str = concat!(env!("CARGO_PKG_VERSION"), " (", env!("COX_BUILT"), ")");

/// Distributed LoRA fine-tuning of vision-language-action models.
#[derive(Debug, Parser)]
#[command(name = "cox", version = BUILT, max_term_width = 120, after_help = EXIT_CODES)]
pub struct Cli {
    /// How this process logs
    #[command(flatten)]
    pub log: telemetry::LogFlags,
    #[command(subcommand)]
    command: Command,
}

/// Shown under `cox --help`.
const EXIT_CODES: &str = "\
Exit codes:
  0 done · 1 internal error · 2 bad usage or configuration · 3 bad model or data · 4 a worker failed
  5 out of memory at micro-batch 1 · 6 rendezvous failed · 7 no progress · 8 coordinator lost
  9 audit: samples missing or used twice · 128+n ended by signal n";

#[derive(Debug, Subcommand)]
enum Command {
    /// Train: start a coordinator and workers, watch them, hand over the adapter
    Run(Box<run::RunArgs>),
    /// Validate a configuration, its model and its data, and train nothing
    Check(check::CheckArgs),
    /// Say what a run will take, which micro-batches fit, and what each setting would save
    Plan(plan::PlanArgs),
    /// Say where the time and the memory of a run's steps go, by stage and operation, with a flame graph
    Profile(profile::ProfileArgs),
    /// Show this machine's GPUs, once or live
    Gpu(gpu::GpuArgs),
    /// Test this node: driver, bandwidth, every collective, a small training step against known numbers
    Selftest(selftest::SelftestArgs),
    /// Measure the held-out action error of a run's newest checkpoint
    Eval(eval::EvalArgs),
    /// Write what a user takes away of a checkpoint: adapter, weights, statistics, or a merged model
    Export(export::ExportArgs),
    /// Show what a model writes: as a run has left it, or before it is trained
    Generate(generate::GenerateArgs),
    /// Let a trained policy answer robots, over openpi's WebSocket protocol
    Serve(serve::ServeArgs),
    /// Write a run file to begin with, from what is in a data set
    Init(init::InitArgs),
    /// Look at a data set: what is in it, what is wrong with it, its statistics, its episodes
    #[command(subcommand)]
    Data(data::DataCommand),
    /// Show, verify or tidy a store of features
    #[command(subcommand)]
    Cache(cache::CacheCommand),
    /// Run the model by itself, to compare it with another implementation
    #[command(subcommand)]
    Model(model::ModelCommand),
    /// Show where a run is
    Status(status::StatusArgs),
    /// Follow a run as it goes
    Watch(watch::WatchArgs),
    /// Follow runs on a full screen, and steer them
    Top(top::TopArgs),
    /// Show the coordinator's log or a rank's
    Logs(logs::LogsArgs),
    /// Stop at the next step boundary and wait
    Pause(control::PauseArgs),
    /// Go on after `pause`
    Resume(control::ResumeArgs),
    /// Write a checkpoint at the next step boundary
    Checkpoint(control::CheckpointArgs),
    /// Let one node of an elastic world go at the next step boundary; the rest trains on
    Drain(control::DrainArgs),
    /// Begin a version of the kept features with the present adapter
    RebuildCache(rebuild_cache::RebuildCacheArgs),
    /// Finish the step in flight, write a checkpoint, export the adapter, end
    Stop(control::StopArgs),
    /// Prove that every sample was consumed exactly once, whatever happened
    Audit(audit::AuditArgs),
    /// List what ran below a directory, and how it ended
    Runs(runs::RunsArgs),
    /// Write what runs have done as one page that opens anywhere; several are compared
    Report(report::ReportArgs),
    /// Say what two runs differ in: program, keys, results
    Diff(runs::DiffArgs),
    /// Show peak memory of every rank by phase
    Memory(status::MemoryArgs),
    /// Play a fault script in virtual time: recovery times, rollbacks, audit
    Simulate(simulate::SimulateArgs),
    /// Write a script that completes commands and flags in a shell
    Completions(shell::CompletionsArgs),
    /// Write man pages into a directory
    Man(shell::ManArgs),
    /// Make a token for callers of a coordinator
    Token(token::TokenArgs),
    /// Serve one run (`cox run` does this itself)
    Coordinator(coordinator::CoordinatorArgs),
    /// Be one worker (`cox run` starts these), or train alone with --config
    Worker(worker::WorkerArgs),
}

impl Cli {
    /// Where this process's log goes.
    pub fn log_destination(&self) -> Destination {
        match self.command {
            Command::Run(_) | Command::Coordinator(_) => Destination::Queue,
            Command::Top(_) => Destination::Nowhere,
            _ => Destination::Stderr,
        }
    }
}

/// Runs the subcommand. What a run shows goes where the process's log goes, if that has a writer.
pub fn execute(cli: Cli, writer: Option<LogWriter>) -> Outcome {
    match cli.command {
        Command::Run(args) => run::execute(&args, &cli.log, writer.unwrap_or_else(LogWriter::new)),
        Command::Check(args) => check::execute(&args),
        Command::Plan(args) => plan::execute(&args),
        Command::Profile(args) => profile::execute(&args),
        Command::Gpu(args) => gpu::execute(&args),
        Command::Selftest(args) => selftest::execute(&args),
        Command::Eval(args) => eval::execute(&args),
        Command::Export(args) => export::execute(&args),
        Command::Generate(args) => generate::execute(&args),
        Command::Serve(args) => serve::execute(&args),
        Command::Init(args) => init::execute(&args),
        Command::Data(command) => data::execute(&command),
        Command::Cache(command) => cache::execute(&command),
        Command::Model(command) => model::execute(&command),
        Command::Status(args) => status::status(&args),
        Command::Watch(args) => watch::execute(&args),
        Command::Top(args) => top::execute(&args),
        Command::Logs(args) => logs::execute(&args),
        Command::Completions(args) => shell::completions(&args, Cli::command()),
        Command::Man(args) => shell::man(&args, Cli::command()),
        Command::Pause(args) => control::pause(&args),
        Command::Resume(args) => control::resume(&args),
        Command::Checkpoint(args) => control::checkpoint(&args),
        Command::Drain(args) => control::drain(&args),
        Command::RebuildCache(args) => rebuild_cache::execute(&args),
        Command::Stop(args) => control::stop(&args),
        Command::Audit(args) => audit::execute(&args),
        Command::Runs(args) => runs::list(&args),
        Command::Report(args) => report::execute(&args),
        Command::Diff(args) => runs::diff(&args),
        Command::Memory(args) => status::memory(&args),
        Command::Simulate(args) => simulate::execute(&args),
        Command::Token(args) => token::execute(&args),
        Command::Coordinator(args) => coordinator::execute(&args),
        Command::Worker(args) => worker::execute(&args),
    }
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        path::{Path, PathBuf},
    };

    use clap::{ValueEnum, error::ErrorKind};

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_shell_learns_every_command_and_every_command_has_a_page() {
        for shell in clap_complete::Shell::value_variants() {
            let script = shell::script(*shell, Cli::command());
            let named = ["simulate", "rebuild-cache", "completions"];
            assert!(named.iter().all(|command| script.contains(command)), "{shell}");
        }
        let dir = tempfile::tempdir().expect("a directory");
        shell::pages(&dir.path().join("man1"), Cli::command()).expect("pages");
        for page in ["cox.1", "cox-run.1", "cox-cache-verify.1"] {
            let text = fs::read_to_string(dir.path().join("man1").join(page)).expect("a page");
            assert!(text.contains(".SH NAME"), "{page}");
        }
    }

    #[test]
    fn a_rebuild_of_the_cache_can_be_asked_for() {
        let cli =
            Cli::try_parse_from(["cox", "rebuild-cache", "--json"]).unwrap_or_else(|error| panic!("{error}"));
        assert!(matches!(cli.command, Command::RebuildCache(_)));
    }

    #[test]
    fn torchruns_spellings_are_taken_with_dashes_and_underscores() {
        for flag in [
            "nproc-per-node",
            "node-rank",
            "rdzv-endpoint",
            "rdzv-id",
            "rdzv-conf",
            "rdzv-backend",
            "master-addr",
            "master-port",
            "local-addr",
            "max-restarts",
            "max-rescales",
            "monitor-interval",
            "log-dir",
            "local-ranks-filter",
        ] {
            for spelled in [flag.to_owned(), flag.replace('-', "_")] {
                let args = ["cox", "run", "a.yaml", &format!("--{spelled}"), "1", "train.steps=3"];
                let cli = Cli::try_parse_from(args).unwrap_or_else(|error| panic!("{error}"));
                let Command::Run(run) = cli.command else { panic!("not `run`") };
                assert_eq!(run.spec.overrides, ["train.steps=3"]);
            }
        }
        Cli::try_parse_from(["cox", "run", "--standalone", "-r", "3", "-t", "0:1", "a.yaml"]).unwrap();
    }

    /// Lines of a page's code blocks that begin with `cox`, each command by itself and without its comment.
    /// Without a comment, and without where its output goes.
    fn before_rest(line: &str) -> &str {
        [" #", " >"].iter().fold(line, |line, mark| line.split(mark).next().unwrap_or_default())
    }

    fn commands(page: &str) -> Vec<String> {
        let blocks = page.split("\n```").skip(1).step_by(2);
        let lines = blocks.flat_map(str::lines).map(|line| line.trim_start_matches("$ "));
        let commands = lines.filter(|line| line.starts_with("cox "));
        let parts = commands.flat_map(|line| before_rest(line).split(';'));
        parts.map(|command| command.trim().to_owned()).filter(|command| !command.contains('|')).collect()
    }

    fn pages(folder: &Path, found: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(folder).expect("a folder of the repository").flatten() {
            match entry.path() {
                path if path.is_dir() => pages(&path, found),
                path if path.extension().is_some_and(|it| it == "md") => found.push(path),
                _ => {}
            }
        }
    }

    #[test]
    fn every_command_that_the_documents_show_is_one_that_cox_takes() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let mut found = vec![root.join("README.md")];
        pages(&root.join("docs"), &mut found);
        let mut tried = 0;
        for page in found {
            for command in commands(&fs::read_to_string(&page).expect("a page")) {
                tried += 1;
                let refused = Cli::try_parse_from(command.split_whitespace()).err();
                let refused = refused.filter(|error| error.kind() != ErrorKind::DisplayVersion);
                assert!(refused.is_none(), "{}: {command}\n{}", page.display(), refused.expect("an error"));
            }
        }
        assert!(tried > 25, "only {tried} commands were found");
    }
}
