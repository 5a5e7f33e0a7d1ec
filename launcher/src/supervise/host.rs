//! The coordinator as a child of its launcher.
//!
//! The launcher keeps the listening socket open. A coordinator that is killed is started again on the same socket: it reads its
//! journal, and the workers, whose connections have waited in the socket's queue, go on.

use std::{io, net::TcpListener, os::fd::OwnedFd, path::Path, process::Stdio, sync::Arc};

use tokio::{sync::mpsc, task::JoinHandle};

use super::{
    child::Program,
    console::Console,
    keeper::{self, Keeper, Output, Sink},
    machine::Ended,
};
use crate::launch::streams::Route;

/// How often a coordinator that dies is started again. One that dies more often has a cause that will not go away.
const RESTARTS: u32 = 3;

/// The coordinator's process, through restarts.
pub struct Host {
    keeper: Keeper,
    program: Program,
    listener: TcpListener,
    output: Output,
    restarts: u32,
    ends: mpsc::Sender<Ended>,
}

impl Host {
    /// Starts the coordinator; how it ends arrives at `ends`.
    pub fn start(
        program: Program,
        listener: TcpListener,
        log_dir: &Path,
        console: Arc<dyn Console>,
        ends: mpsc::Sender<Ended>,
    ) -> io::Result<Self> {
        let sink =
            || Sink { route: Route { file: true, console: true }, path: log_dir.join("coordinator.log") };
        let output = Output { stdout: sink(), stderr: sink(), console, prefix: String::new() };
        let keeper = spawn(&program, &listener, &output, ends.clone())?;
        Ok(Self { keeper, program, listener, output, restarts: 0, ends })
    }

    /// Whether an end was a death that a new start can mend, and the new start has been made.
    pub fn revive(&mut self, how: Ended) -> bool {
        // 1 is an internal error, 101 a panic; other codes are the run's outcome.
        let died = matches!(how, Ended::Signal(_) | Ended::Code(1 | 101));
        if !died || self.restarts >= RESTARTS {
            return false;
        }
        self.restarts += 1;
        tracing::warn!(
            ?how,
            restart = self.restarts,
            "the coordinator died; starting it again from its journal"
        );
        match spawn(&self.program, &self.listener, &self.output, self.ends.clone()) {
            Ok(keeper) => {
                self.keeper = keeper;
                true
            }
            Err(error) => {
                tracing::error!(%error, "the coordinator cannot be started again");
                false
            }
        }
    }

    /// Sends it a signal.
    pub fn signal(&self, number: i32) {
        self.keeper.signal(number);
    }
}

fn spawn(
    program: &Program,
    listener: &TcpListener,
    output: &Output,
    ends: mpsc::Sender<Ended>,
) -> io::Result<Keeper> {
    let socket = Stdio::from(OwnedFd::from(listener.try_clone()?));
    let (keeper, end): (Keeper, JoinHandle<Ended>) = keeper::start(program, socket, output)?;
    tokio::spawn(async move {
        // A lost receiver means that nobody cares any more.
        if let Ok(how) = end.await {
            let _ = ends.send(how).await;
        }
    });
    Ok(keeper)
}
