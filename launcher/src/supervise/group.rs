//! The workers of one launcher: what each runs, where its output goes, and how one is started.

use std::{fs::File, io, path::PathBuf, process::Stdio, sync::Arc, time::Duration};

use coxswain_proto::v1::JoinNodeRequest;
use coxswain_worker::{feeder::note, memory::killed};
use tokio::sync::mpsc;

use super::{
    child::Program,
    console::{Console, Terminal},
    machine::ProcessExit,
    process::{self, ChildProcess, Output, Sink},
    report::Log,
};
use crate::launch::{plan, streams::Route, worker_env::Common};

/// The workers of one launcher.
pub struct WorkerGroup {
    /// Place and environment.
    pub common: Common,
    /// What each runs; the environment of its place is added.
    pub program: PathBuf,
    /// Arguments.
    pub args: Vec<String>,
    /// Where their output goes.
    pub output: plan::OutputPlan,
    /// How long they may take to leave after a signal.
    pub stop_patience: Duration,
    /// This machine.
    pub host: String,
    /// How this launcher joined, to ask for its place again.
    pub join: JoinNodeRequest,
}

/// A started worker.
pub struct WorkerProcess {
    /// Process.
    pub process: ChildProcess,
    /// Log, if it has one of its own.
    pub log: Option<Log>,
    /// What it is reading, if there is memory to note that.
    pub note: Option<File>,
}

/// Which process of a worker is started.
#[derive(Clone, Copy, Debug)]
pub struct Attempt {
    /// How often the worker was started before.
    pub number: u32,
    /// Whether the kernel killed the one before because memory ran out.
    pub after_memory_kill: bool,
}

impl Attempt {
    /// The one that a launch begins with.
    pub fn first() -> Self {
        Self { number: 0, after_memory_kill: false }
    }
}

impl WorkerGroup {
    /// Starts a worker, by its number among ours.
    pub fn start(
        &self,
        local: u32,
        attempt: Attempt,
        terminal: &Arc<Terminal>,
        ended: mpsc::Sender<(u32, ProcessExit)>,
    ) -> io::Result<WorkerProcess> {
        let rank = self.common.place.first_rank + local;
        let local_rank = self.common.place.first_local_rank + local;
        let shown = self.output.filter.as_ref().is_none_or(|ranks| ranks.contains(&local_rank));
        let (redirects, tee) =
            (self.output.redirects.streams(local_rank), self.output.tee.streams(local_rank));
        let dir = self.output.log_dir.join(format!("rank{rank:04}"));
        let sink =
            |redirect, tee, name| Sink { route: Route::new(redirect, tee, shown), path: dir.join(name) };
        let output = Output {
            stdout: sink(redirects.stdout, tee.stdout, "stdout.log"),
            stderr: sink(redirects.stderr, tee.stderr, "stderr.log"),
            console: Arc::clone(terminal) as Arc<dyn Console>,
            prefix: format!("[rank{rank}] "),
        };
        let log = output.stderr.route.file.then(|| {
            let begin = std::fs::metadata(&output.stderr.path).map_or(0, |log| log.len());
            Log { path: output.stderr.path.clone(), begin }
        });
        let mut env = self.common.variables(local, attempt.number);
        if attempt.after_memory_kill {
            env.push((killed::VARIABLE, "1".to_owned()));
        }
        let note = note::make().map(|(memory, place)| {
            env.push((note::VARIABLE, place));
            memory
        });
        let program = Program { path: self.program.clone(), args: self.args.clone(), env };
        let (process, end) = process::start(&program, Stdio::null(), &output)?;
        tokio::spawn(async move {
            // The launcher's receiver lives until all have ended.
            if let Ok(how) = end.await {
                let _ = ended.send((local, how)).await;
            }
        });
        Ok(WorkerProcess { process, log, note: note.ok() })
    }
}
