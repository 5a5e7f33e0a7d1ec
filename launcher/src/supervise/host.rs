//! The coordinator as a child of its launcher.
//!
//! It is given the listening socket as its standard input. The launcher keeps that socket open, too: while a coordinator that died is
//! started again, calls wait in the socket's queue instead of being refused. The new one replays its journal; workers keep training
//! meanwhile. A coordinator that dies again and again is given up.

use std::{
    collections::VecDeque, io, net::TcpListener, os::fd::OwnedFd, path::PathBuf, process::Stdio, sync::Arc,
    time::Instant,
};

use coxswain_proto::limits::{COORDINATOR_RESTARTS, COORDINATOR_WINDOW};
use tokio::task::JoinHandle;

use super::{
    child::Program,
    console::Console,
    keeper::{self, Keeper, Output, Sink},
    machine::Ended,
};
use crate::launch::streams::Route;

/// What a coordinator runs with.
pub struct Hosting {
    /// The program.
    pub program: Program,
    /// Where it listens.
    pub listener: TcpListener,
    /// Directory of its log.
    pub log_dir: PathBuf,
    /// Where its lines are shown.
    pub console: Arc<dyn Console>,
}

/// A coordinator that is started again when it dies.
pub struct Host {
    hosting: Hosting,
    keeper: Keeper,
    end: JoinHandle<Ended>,
    restarts: Restarts,
    dismissed: bool,
}

impl Host {
    /// Starts the coordinator.
    pub fn start(hosting: Hosting) -> io::Result<Self> {
        let (keeper, end) = hosting.spawn()?;
        Ok(Self { hosting, keeper, end, restarts: Restarts::default(), dismissed: false })
    }

    /// Kills it for good.
    pub fn dismiss(&mut self) {
        self.dismissed = true;
        self.keeper.signal(nix::libc::SIGKILL);
    }

    /// Waits for its end by the run's outcome, starting it again when it dies. It died for good if [`died`] says so of the answer.
    /// May be dropped and called again before it is done; not after.
    pub async fn ended(&mut self) -> Ended {
        loop {
            // A keeper's task neither panics nor is aborted.
            let how = (&mut self.end).await.unwrap_or(Ended::Code(-1));
            if self.dismissed || !died(how) {
                return how;
            }
            let Some(count) = self.restarts.allow(Instant::now()) else {
                self.hosting.console.line(&format!(
                    "the coordinator died again ({how}), {COORDINATOR_RESTARTS} times within {} s: it is given up",
                    COORDINATOR_WINDOW.as_secs()
                ));
                return how;
            };
            match self.hosting.spawn_again() {
                Ok((keeper, end)) => (self.keeper, self.end) = (keeper, end),
                Err(error) => {
                    let text = format!("the coordinator died ({how}) and cannot be started again: {error}");
                    self.hosting.console.line(&text);
                    return how;
                }
            }
            self.hosting.console.line(&format!(
                "the coordinator died ({how}) and is started again ({count} of {COORDINATOR_RESTARTS} within {} s); workers train on",
                COORDINATOR_WINDOW.as_secs()
            ));
        }
    }
}

impl Hosting {
    /// What a coordinator is told that takes the place of one that died.
    const AGAIN: &str = "--restarted";

    fn spawn_again(&mut self) -> io::Result<(Keeper, JoinHandle<Ended>)> {
        if !self.program.args.iter().any(|argument| argument == Self::AGAIN) {
            self.program.args.push(Self::AGAIN.to_owned());
        }
        self.spawn()
    }

    fn spawn(&self) -> io::Result<(Keeper, JoinHandle<Ended>)> {
        let path = self.log_dir.join("coordinator.log");
        // Both streams write one file, which is shown once.
        let sink = |console| Sink { route: Route { file: true, console }, path: path.clone() };
        let console = Arc::clone(&self.console);
        let output = Output { stdout: sink(false), stderr: sink(true), console, prefix: String::new() };
        let socket = Stdio::from(OwnedFd::from(self.listener.try_clone()?));
        keeper::start(&self.program, socket, &output)
    }
}

/// Whether a coordinator ended otherwise than by its run's outcome: a signal, an internal error (1), a panic (101).
pub fn died(how: Ended) -> bool {
    matches!(how, Ended::Signal(_) | Ended::Code(-1 | 1 | 101))
}

/// When it was started again lately.
#[derive(Debug, Default)]
struct Restarts(VecDeque<Instant>);

impl Restarts {
    /// Books a restart and returns how many there were in the window; none if there were too many.
    fn allow(&mut self, now: Instant) -> Option<usize> {
        while self.0.front().is_some_and(|at| now.duration_since(*at) >= COORDINATOR_WINDOW) {
            self.0.pop_front();
        }
        if self.0.len() >= COORDINATOR_RESTARTS {
            return None;
        }
        self.0.push_back(now);
        Some(self.0.len())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::supervise::console::Recorder;

    fn host(script: &str, dir: &std::path::Path) -> (Host, Arc<Recorder>) {
        let console = Arc::new(Recorder::default());
        let hosting = Hosting {
            program: Program {
                path: "/bin/sh".into(),
                args: vec!["-c".into(), script.into()],
                env: vec![("DIR", dir.display().to_string())],
            },
            listener: TcpListener::bind("127.0.0.1:0").unwrap(),
            log_dir: dir.to_owned(),
            console: console.clone(),
        };
        (Host::start(hosting).unwrap(), console)
    }

    fn block_on<T>(future: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
    }

    #[test]
    fn only_so_many_restarts_fit_in_a_window() {
        let (mut restarts, start) = (Restarts::default(), Instant::now());
        for second in 0..5u64 {
            let count = restarts.allow(start + Duration::from_secs(second));
            assert_eq!(count, Some(second as usize + 1));
        }
        assert_eq!(restarts.allow(start + Duration::from_secs(59)), None);
        assert_eq!(restarts.allow(start + Duration::from_secs(61)), Some(4), "two have left the window");
    }

    #[test]
    fn a_coordinator_that_dies_is_started_again_until_it_ends_with_an_outcome() {
        let dir = tempfile::tempdir().unwrap();
        let script = "echo life >> $DIR/lives; [ $(wc -l < $DIR/lives) -ge 3 ] && exit 4; kill -9 $$";
        let (how, lines) = block_on(async {
            let (mut host, console) = host(script, dir.path());
            (host.ended().await, console.lines())
        });
        assert_eq!(how, Ended::Code(4));
        assert_eq!(lines.len(), 2, "{lines:?}");
        assert!(lines[1].contains("SIGKILL") && lines[1].contains("(2 of 5 within 60 s)"), "{lines:?}");
    }

    #[test]
    fn one_that_cannot_live_is_given_up_and_one_that_is_dismissed_stays_dead() {
        let dir = tempfile::tempdir().unwrap();
        let (how, lines) = block_on(async {
            let (mut host, console) = host("exit 101", dir.path());
            (host.ended().await, console.lines())
        });
        assert!(died(how));
        assert_eq!(lines.len(), COORDINATOR_RESTARTS + 1, "{lines:?}");
        let how = block_on(async {
            let (mut host, _) = host("exec sleep 1000", dir.path());
            host.dismiss();
            host.ended().await
        });
        assert_eq!(how, Ended::Signal(9));
    }
}
