//! `cox gpu`: the GPUs of this machine, once or live.

use std::{
    io::{BufRead, IsTerminal, stdin},
    sync::mpsc::{self, RecvTimeoutError},
};

use clap::Args;

use crate::{
    exit::{CliError, Outcome},
    gpu::{Driver, Gpu, Peaks},
    launch::rdzv_conf::wait_of,
    render::{gpu as render, say},
};

/// Flags of `cox gpu`.
#[derive(Args, Debug)]
pub struct GpuArgs {
    /// Print a table every interval, with each GPU's peak; Enter resets the peaks
    #[arg(long)]
    watch: bool,
    /// Seconds between tables
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0, requires = "watch")]
    interval: f64,
    /// Print JSON: one array, or with --watch one array a line
    #[arg(long)]
    json: bool,
}

/// Shows the GPUs.
pub fn execute(args: &GpuArgs) -> Outcome {
    let driver = Driver::load().map_err(CliError::bad_input)?;
    if !args.watch {
        let gpus = driver.gpus().map_err(CliError::bad_input)?;
        show(args, &gpus, &Peaks::default(), driver.version().as_deref());
        return Ok(());
    }
    let interval = wait_of(args.interval).filter(|interval| !interval.is_zero());
    let interval = interval.ok_or_else(|| {
        CliError::usage(format!("--interval {}: expected seconds, above 0, at most 31536000", args.interval))
    })?;
    let enter = on_enter();
    let mut peaks = Peaks::default();
    loop {
        let gpus = driver.gpus().map_err(CliError::bad_input)?;
        peaks.observe(&gpus);
        if !show(args, &gpus, &peaks, None) {
            return Ok(());
        }
        match enter.recv_timeout(interval) {
            Ok(()) => peaks.reset(),
            Err(RecvTimeoutError::Timeout) => {}
            // Nobody can press anything: only the interval is left.
            Err(RecvTimeoutError::Disconnected) => std::thread::sleep(interval),
        }
    }
}

/// False if there is no reader any more.
fn show(args: &GpuArgs, gpus: &[Gpu], peaks: &Peaks, driver: Option<&str>) -> bool {
    match (args.json, args.watch) {
        (true, _) => say(render::json(gpus, args.watch.then_some(peaks))),
        (false, true) => say(render::live(gpus, peaks)),
        (false, false) => say(render::once(gpus, driver)),
    }
}

/// A message for every Enter; a closed channel where there is no terminal.
fn on_enter() -> mpsc::Receiver<()> {
    let (pressed, presses) = mpsc::channel();
    if stdin().is_terminal() {
        std::thread::spawn(move || {
            for _ in stdin().lock().lines().map_while(Result::ok) {
                if pressed.send(()).is_err() {
                    return;
                }
            }
        });
    }
    presses
}
