//! One child process: its streams and its end.
//!
//! A task owns the process and is asked to kill it, so that no signal is ever sent to a process id that the
//! kernel has given to another process. Its end is told only after its output has been carried to the last
//! byte.

use std::{
    fs::File,
    io,
    path::{Path, PathBuf},
    process::Stdio,
    sync::Arc,
    time::Duration,
};

use coxswain_proto::in_place;
use tokio::{
    process::Child,
    sync::{Notify, watch},
    task::{JoinHandle, JoinSet},
};

use super::{
    child::{self, ChildStreams, Program},
    console::Console,
    machine::ProcessExit,
    pump::{ConsolePrefix, pump},
    tail::Tail,
};
use crate::launch::streams::Route;

/// How long a pipe may stay open after its process has ended; something the process started may hold it.
const DRAIN: Duration = Duration::from_secs(1);

/// Where a process's output goes.
#[derive(Clone)]
pub struct Output {
    /// Log of standard output, if it is kept, and whether it is shown.
    pub stdout: Sink,
    /// Log of standard error, if it is kept, and whether it is shown.
    pub stderr: Sink,
    /// Where it is shown.
    pub console: Arc<dyn Console>,
    /// In front of every line shown.
    pub prefix: String,
}

/// Where one stream goes.
#[derive(Clone, Debug)]
pub struct Sink {
    /// File or console or both.
    pub route: Route,
    /// The file; used if the route says so.
    pub path: PathBuf,
}

/// A running process.
#[derive(Debug)]
pub struct ChildProcess {
    /// Process id, for people.
    pub pid: u32,
    condemned: Arc<Notify>,
}

impl ChildProcess {
    /// Kills the process and what it started; nothing if it has ended.
    pub fn kill(&self) {
        self.condemned.notify_one();
    }
}

/// Starts `program`; the second value completes when it has ended and its output is written.
pub fn start(
    program: &Program,
    stdin: Stdio,
    output: &Output,
) -> io::Result<(ChildProcess, JoinHandle<ProcessExit>)> {
    let (stdout, stdout_tail) = open(&output.stdout)?;
    let (stderr, stderr_tail) = open(&output.stderr)?;
    let mut process = child::spawn(program, ChildStreams { stdin, stdout, stderr })?;
    let mut pumps = JoinSet::new();
    let shown = || ConsolePrefix { console: Arc::clone(&output.console), prefix: output.prefix.clone() };
    if let Some(pipe) = process.stdout.take() {
        pumps.spawn(pump(pipe, shown()));
    }
    if let Some(pipe) = process.stderr.take() {
        pumps.spawn(pump(pipe, shown()));
    }
    let (writing, written) = watch::channel(());
    for tail in [stdout_tail, stderr_tail].into_iter().flatten() {
        pumps.spawn(tail.show(shown(), written.clone()));
    }
    let condemned = Arc::new(Notify::new());
    let handle = ChildProcess { pid: process.id().unwrap_or_default(), condemned: Arc::clone(&condemned) };
    Ok((handle, tokio::spawn(keep(process, condemned, pumps, writing))))
}

/// A stream that goes to a file is given the file itself, and is shown from there; one that is only shown
/// goes through a pipe.
fn open(sink: &Sink) -> io::Result<(Stdio, Option<Tail>)> {
    let Route { file, console } = sink.route;
    if !file {
        return Ok((if console { Stdio::piped() } else { Stdio::null() }, None));
    }
    let file = append(&sink.path)?;
    let from = file.metadata()?.len();
    Ok((file.into(), console.then(|| Tail { path: sink.path.clone(), from })))
}

/// Logs are continued, not replaced: a run that is started again keeps the log of its first failure.
fn append(path: &Path) -> io::Result<File> {
    if let Some(dir) = path.parent() {
        std::fs::create_dir_all(dir)?;
    }
    in_place::append(path)
}

async fn keep(
    mut process: Child,
    condemned: Arc<Notify>,
    mut pumps: JoinSet<()>,
    writing: watch::Sender<()>,
) -> ProcessExit {
    let leader = process.id();
    let status = loop {
        tokio::select! {
            status = process.wait() => break status,
            () = condemned.notified() => child::kill_group(&process),
        }
    };
    // What the process started is of no use without it, and may hold what its successor needs.
    child::kill_leftovers(leader);
    drop(writing);
    let drained = async { while pumps.join_next().await.is_some() {} };
    if tokio::time::timeout(DRAIN, drained).await.is_err() {
        tracing::debug!("a pipe is still open after its process has ended");
    }
    // Waiting for a child we started fails only if somebody else reaped it; how it ended is then unknown.
    status.map_or(ProcessExit::Code(-1), ProcessExit::from)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::supervise::console::Recorder;

    const FILE: Route = Route { file: true, console: false };
    const BOTH: Route = Route { file: true, console: true };

    fn shell(script: &str) -> Program {
        Program { path: "/bin/sh".into(), args: vec!["-c".into(), script.into()], env: vec![] }
    }

    fn output(dir: &Path, route: Route) -> (Output, Arc<Recorder>) {
        let recorder = Arc::new(Recorder::default());
        let sink = |name: &str| Sink { route, path: dir.join("rank0000").join(name) };
        let console = Arc::clone(&recorder) as Arc<dyn Console>;
        let (stdout, stderr) = (sink("stdout.log"), sink("stderr.log"));
        (Output { stdout, stderr, console, prefix: "[rank0] ".into() }, recorder)
    }

    fn run(script: &str, output: &Output, kill: bool) -> ProcessExit {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
            let (handle, end) = start(&shell(script), Stdio::null(), output).unwrap();
            if kill {
                handle.kill();
            }
            end.await.unwrap()
        })
    }

    #[test]
    fn tee_writes_each_stream_to_its_file_and_shows_it() {
        let dir = tempfile::tempdir().unwrap();
        let (output, recorder) = output(dir.path(), BOTH);
        assert_eq!(run("echo out; echo err >&2; exit 3", &output, false), ProcessExit::Code(3));
        assert_eq!(std::fs::read_to_string(dir.path().join("rank0000/stdout.log")).unwrap(), "out\n");
        assert_eq!(std::fs::read_to_string(dir.path().join("rank0000/stderr.log")).unwrap(), "err\n");
        let mut lines = recorder.lines();
        lines.sort();
        assert_eq!(lines, ["[rank0] err", "[rank0] out"]);
    }

    #[test]
    fn a_redirected_stream_is_not_shown_and_logs_are_continued() {
        let dir = tempfile::tempdir().unwrap();
        let (output, recorder) = output(dir.path(), FILE);
        run("echo first", &output, false);
        run("echo second", &output, false);
        assert_eq!(
            std::fs::read_to_string(dir.path().join("rank0000/stdout.log")).unwrap(),
            "first\nsecond\n"
        );
        assert!(recorder.lines().is_empty());
    }

    #[test]
    fn a_process_that_is_killed_is_told_as_such() {
        let dir = tempfile::tempdir().unwrap();
        let (output, _) = output(dir.path(), FILE);
        assert_eq!(run("exec sleep 1000", &output, true), ProcessExit::Signal(9));
    }

    #[test]
    fn what_a_process_started_ends_with_it() {
        let dir = tempfile::tempdir().unwrap();
        let (output, recorder) = output(dir.path(), BOTH);
        // The pipe would be held open for the whole drain by the child's child.
        assert_eq!(run("sleep 1000 & echo $!; exit 4", &output, false), ProcessExit::Code(4));
        let lines = recorder.lines();
        let pid = lines[0].trim_start_matches("[rank0] ");
        let gone = |stat: std::io::Result<String>| stat.map_or(true, |stat| stat.contains(") Z "));
        let since = std::time::Instant::now();
        while !gone(std::fs::read_to_string(format!("/proc/{pid}/stat"))) {
            assert!(since.elapsed() < Duration::from_secs(60), "it is left to end by itself");
            std::thread::yield_now();
        }
    }

    #[test]
    fn the_last_line_before_the_end_is_not_lost() {
        let dir = tempfile::tempdir().unwrap();
        let (output, recorder) = output(dir.path(), BOTH);
        run("i=0; while [ $i -lt 2000 ]; do echo line $i; i=$((i+1)); done", &output, false);
        let lines = recorder.lines();
        assert_eq!(lines.len(), 2000);
        assert_eq!(lines[1999], "[rank0] line 1999");
    }
}
