//! `cox`: launches, coordinates, trains, and answers questions about runs. This file only wires.

mod accelerator;
mod audit;
mod commands;
mod control;
mod endpoint;
mod exit;
mod gpu;
mod launch;
mod plan;
mod render;
mod simulate;
mod supervise;
mod telemetry;

use std::process::ExitCode;

use clap::Parser;
use coxswain_worker::memory::CountingAllocator;
use mimalloc::MiMalloc;

/// Counts, so that a worker can say how much memory each phase took.
#[global_allocator]
static ALLOCATOR: CountingAllocator<MiMalloc> = CountingAllocator(MiMalloc);

fn main() -> ExitCode {
    let cli = commands::Cli::parse();
    let logging = telemetry::start(&cli.log, cli.steers());
    match commands::execute(cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failed) => {
            if let Some(message) = failed.message {
                logging.last_word(&message);
            }
            ExitCode::from(failed.exit.code())
        }
    }
}
