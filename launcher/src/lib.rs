//! `cox`: launches, coordinates, trains, and answers questions about runs.

mod audit;
mod bucket;
mod clock;
mod commands;
mod control;
mod credentials;
mod endpoint;
mod exit;
mod gpu;
mod launch;
mod log_tail;
mod notify;
mod open_files;
mod orphans;
mod plan;
mod profile;
mod relay;
mod render;
mod report;
mod run_dir;
mod spelling;
mod supervise;
mod tasks;
mod telemetry;
mod threads;
mod top;
mod view;

use std::process::ExitCode;

pub use tasks::standard;

/// Runs the command line with the tasks that this program has. The allocator is the program's own: a worker
/// reads from it how much memory each phase took
/// ([`CountingAllocator`](coxswain_worker::memory::CountingAllocator)).
pub fn run(tasks: coxswain_worker::device::Tasks) -> ExitCode {
    open_files::raise_limit();
    orphans::wait_for_them();
    supervise::child::survive_file_limits();
    threads::explain_panics();
    tasks::install(tasks);
    coxswain_remote::install();
    let cli = commands::Cli::from_command_line().unwrap_or_else(|error| spelling::explained(error).exit());
    let logging = telemetry::start(&cli.log, cli.log_destination());
    match working_directory().and_then(|()| commands::execute(cli, logging.writer())) {
        Ok(()) if render::all_written() => ExitCode::SUCCESS,
        Ok(()) => ExitCode::from(exit::Exit::Internal.code()),
        Err(failed) => {
            if let Some(message) = failed.message {
                let why = threads::explain(&message).map(|why| format!("\n{why}")).unwrap_or_default();
                logging.last_word(&format!("{message}{why}"));
            }
            ExitCode::from(failed.exit.code())
        }
    }
}

/// Libraries ask for it, and some panic where it has been deleted.
fn working_directory() -> exit::Outcome {
    std::env::current_dir().map(drop).map_err(|error| {
        let advice = "change to an existing directory (`cd`), and start again";
        exit::CliError::usage(format!("the working directory cannot be found: {error}; {advice}"))
    })
}
