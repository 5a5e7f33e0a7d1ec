//! The coordinator as a child of its launcher.
//!
//! It is given the listening socket as its standard input. It is not started again when it dies: what it has in memory of its workers
//! is not in its journal yet, so a new one would turn them away. The run ends, and goes on from its newest checkpoint.

use std::{io, net::TcpListener, os::fd::OwnedFd, path::Path, process::Stdio, sync::Arc};

use tokio::sync::mpsc;

use super::{
    child::Program,
    console::Console,
    keeper::{self, Keeper, Output, Sink},
    machine::Ended,
};
use crate::launch::streams::Route;

/// Starts the coordinator on `listener`; how it ends arrives at `ends`.
pub fn start(
    program: &Program,
    listener: TcpListener,
    log_dir: &Path,
    console: Arc<dyn Console>,
    ends: mpsc::Sender<Ended>,
) -> io::Result<Keeper> {
    let sink = || Sink { route: Route { file: true, console: true }, path: log_dir.join("coordinator.log") };
    let output = Output { stdout: sink(), stderr: sink(), console, prefix: String::new() };
    let socket = Stdio::from(OwnedFd::from(listener));
    let (keeper, end) = keeper::start(program, socket, &output)?;
    tokio::spawn(async move {
        // A lost receiver means that nobody cares any more.
        if let Ok(how) = end.await {
            let _ = ends.send(how).await;
        }
    });
    Ok(keeper)
}

/// Whether a coordinator ended otherwise than by its run's outcome: a signal, an internal error (1), a panic (101).
pub fn died(how: Ended) -> bool {
    matches!(how, Ended::Signal(_) | Ended::Code(1 | 101))
}
