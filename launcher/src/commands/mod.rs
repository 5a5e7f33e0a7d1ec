//! The subcommands, one file each.

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

use crate::{
    endpoint::Target,
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

/// Subcommands by what they are for, as `cox --help` lists them. Those that other subcommands start by
/// themselves are left out.
const GROUPS: [(&str, &[&str]); 6] = [
    ("Train", &["init", "check", "plan", "run", "eval", "export"]),
    ("Inspect", &["status", "watch", "top", "logs", "memory", "runs", "report", "diff", "audit", "profile"]),
    ("Steer", &["pause", "resume", "checkpoint", "drain", "rebuild-cache", "stop"]),
    ("Serve", &["serve", "generate"]),
    ("Data and models", &["data", "cache", "model"]),
    ("Machines and shells", &["gpu", "selftest", "simulate", "token", "completions", "man", "help"]),
];
/// Shown under `cox --help`.
const EXIT_CODES: &str = "\
Exit codes:
  0 done · 1 internal error · 2 bad usage or configuration · 3 bad model or data · 4 a worker failed
  5 out of memory at micro-batch 1 · 6 rendezvous failed · 7 no progress · 8 coordinator lost
  9 audit: samples missing or used twice · 128+n ended by signal n";

#[derive(Debug, Subcommand)]
enum Command {
    /// Launch the coordinator and the workers, train, and export the adapter
    Run(Box<run::RunArgs>),
    /// Validate a run file, its model and its data without training
    Check(check::CheckArgs),
    /// Predict a run's memory, the micro-batches that fit, and what each setting saves
    Plan(plan::PlanArgs),
    /// Profile training steps: time and memory by stage and operation, with a flame graph
    Profile(profile::ProfileArgs),
    /// Show this machine's GPUs
    Gpu(gpu::GpuArgs),
    /// Test this node: driver, bandwidth, collectives, a small training step with known results
    Selftest(selftest::SelftestArgs),
    /// Evaluate a run's newest checkpoint on held-out samples
    Eval(eval::EvalArgs),
    /// Export a checkpoint: adapter, weights and statistics, or a merged model
    Export(export::ExportArgs),
    /// Generate text with a trained or a pretrained model, or separate recordings
    Generate(generate::GenerateArgs),
    /// Serve a policy to robots over openpi's WebSocket protocol
    Serve(serve::ServeArgs),
    /// Write a first run file for a data set
    Init(init::InitArgs),
    /// Inspect a data set: contents, problems, statistics, episodes
    #[command(subcommand)]
    Data(data::DataCommand),
    /// Show, verify or clean up a feature cache
    #[command(subcommand)]
    Cache(cache::CacheCommand),
    /// Run a model's forward pass alone, to compare it with another implementation
    #[command(subcommand)]
    Model(model::ModelCommand),
    /// Show the state of a run
    Status(status::StatusArgs),
    /// Print a run's events as they happen
    Watch(watch::WatchArgs),
    /// Watch and steer runs on a full screen
    Top(top::TopArgs),
    /// Show the log of the coordinator or of a rank
    Logs(logs::LogsArgs),
    /// Pause a run at the next step boundary
    Pause(Target),
    /// Resume a paused run
    Resume(Target),
    /// Write a checkpoint at the next step boundary
    Checkpoint(Target),
    /// Remove a node from an elastic run at the next step boundary; the others keep training
    Drain(control::DrainArgs),
    /// Rebuild the feature cache with the current adapter
    RebuildCache(rebuild_cache::RebuildCacheArgs),
    /// Stop a run after the current step: write a checkpoint, export the adapter, exit
    Stop(control::StopArgs),
    /// Verify from the journal that every sample was consumed exactly once
    Audit(audit::AuditArgs),
    /// List the runs in a directory and how they ended
    Runs(runs::RunsArgs),
    /// Write an HTML report of one run, or of several side by side
    Report(report::ReportArgs),
    /// Compare two runs: program, configuration, results
    Diff(runs::DiffArgs),
    /// Show each rank's peak memory by phase
    Memory(status::MemoryArgs),
    /// Simulate a fault script in virtual time: recovery times, rollbacks, audit
    Simulate(simulate::SimulateArgs),
    /// Print a shell completion script
    Completions(shell::CompletionsArgs),
    /// Write man pages to a directory
    Man(shell::ManArgs),
    /// Create a token for clients of a coordinator
    Token(token::TokenArgs),
    /// Run a coordinator alone (`cox run` starts it)
    Coordinator(coordinator::CoordinatorArgs),
    /// Run one worker (`cox run` starts it), or train without a coordinator with --config
    Worker(worker::WorkerArgs),
}

impl Cli {
    /// Reads the command line.
    pub fn from_command_line() -> Result<Self, clap::Error> {
        Self::from_arg_matches(&Self::with_groups().try_get_matches()?)
    }

    /// The program with its subcommands in [`GROUPS`], which clap has no heading for.
    fn with_groups() -> clap::Command {
        let mut program = Self::command();
        program.build();
        let about = |name: &str| {
            let found = program.find_subcommand(name).and_then(clap::Command::get_about);
            found.map_or_else(String::new, ToString::to_string)
        };
        let listed = |names: &[&str]| -> String {
            names.iter().map(|name| format!("\n  {name:<13}  {}", about(name))).collect()
        };
        let groups: String =
            GROUPS.iter().map(|(title, names)| format!("{title}:{}\n\n", listed(names))).collect();
        let template = format!(
            "{{about-with-newline}}\n{{usage-heading}} {{usage}}\n\n{groups}Options:\n{{options}}\n\n{{after-help}}"
        );
        Self::command().help_template(template)
    }

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

    /// Subcommands that other subcommands start by themselves, and that no group lists.
    const INTERNAL: [&str; 2] = ["coordinator", "worker"];

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_command_is_in_one_group_or_internal() {
        let mut listed: Vec<_> =
            GROUPS.iter().flat_map(|(_, names)| *names).chain(&INTERNAL).copied().collect();
        listed.sort_unstable();
        let mut program = Cli::command();
        program.build();
        let mut there: Vec<_> = program.get_subcommands().map(clap::Command::get_name).collect();
        there.sort_unstable();
        assert_eq!(listed, there);
        let help = Cli::with_groups().render_help().to_string();
        assert!(
            help.contains("\nSteer:\n  pause          Pause a run at the next step boundary\n"),
            "{help}"
        );
        assert!(help.lines().all(|line| line.chars().count() <= 110), "{help}");
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
