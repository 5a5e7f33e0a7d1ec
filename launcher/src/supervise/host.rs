//! The coordinator as a child of its launcher.
//!
//! It is given the listening socket as its standard input. The launcher keeps that socket open, too: while a
//! coordinator that died is started again, calls wait in the socket's queue instead of being refused. The new
//! one replays its journal; workers keep training meanwhile. One that was killed is started again at once.
//! One that ended by an error of its own, which may pass as a full disk does, is started after a pause, each
//! time twice as long, while workers look for it. One that dies again and again is given up.

use std::{
    collections::VecDeque,
    io,
    net::TcpListener,
    os::fd::OwnedFd,
    path::PathBuf,
    process::Stdio,
    sync::Arc,
    time::{Duration, Instant},
};

use coxswain_proto::limits::{COORDINATOR_PATIENCE, COORDINATOR_RESTARTS, COORDINATOR_WINDOW};
use tokio::task::JoinHandle;

use super::{
    child::Program,
    console::Console,
    machine::ProcessExit,
    process::{self, ChildProcess, Output, Sink},
};
use crate::clock;
use crate::launch::streams::Route;

/// What a coordinator runs with.
pub struct HostConfig {
    /// The program.
    pub program: Program,
    /// Where it listens.
    pub listener: TcpListener,
    /// Directory of its log.
    pub log_dir: PathBuf,
    /// Where its lines are shown.
    pub console: Arc<dyn Console>,
}

/// Before a coordinator is started again that ended by an error of its own.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
// All pauses together leave one that errs again and again within the window, and workers still look for it
// then.
const _: () = assert!(FIRST_PAUSE.as_secs() << COORDINATOR_RESTARTS < COORDINATOR_WINDOW.as_secs());
const _: () = assert!(COORDINATOR_WINDOW.as_secs() < COORDINATOR_PATIENCE.as_secs());

/// A coordinator that is started again when it dies.
pub struct Host {
    hosting: HostConfig,
    life: Life,
    restarts: Restarts,
    dismissed: bool,
}

enum Life {
    Lives(ChildProcess, JoinHandle<ProcessExit>),
    /// It died so, and is started again at that time.
    Dead(ProcessExit, Instant),
}

impl Host {
    /// Starts the coordinator.
    pub fn start(hosting: HostConfig) -> io::Result<Self> {
        Self::pausing(hosting, FIRST_PAUSE)
    }

    fn pausing(hosting: HostConfig, first_pause: Duration) -> io::Result<Self> {
        let (process, end) = hosting.spawn()?;
        let restarts = Restarts { lately: VecDeque::new(), first_pause };
        Ok(Self { hosting, life: Life::Lives(process, end), restarts, dismissed: false })
    }

    /// Kills it for good.
    pub fn dismiss(&mut self) {
        self.dismissed = true;
        if let Life::Lives(process, _) = &self.life {
            process.kill();
        }
    }

    /// Waits for its end by the run's outcome, starting it again when it dies. It died for good if [`died`]
    /// says so of the answer. May be dropped and called again before it is done; not after.
    pub async fn ended(&mut self) -> ProcessExit {
        loop {
            match &mut self.life {
                Life::Lives(_, end) => {
                    // A child process's task neither panics nor is aborted.
                    let how = end.await.unwrap_or(ProcessExit::Code(-1));
                    if self.dismissed || !died(how) || !self.will_live_again(how) {
                        return how;
                    }
                }
                Life::Dead(how, _) if self.dismissed => return *how,
                Life::Dead(how, at) => {
                    let how = *how;
                    tokio::time::sleep_until((*at).into()).await;
                    match self.hosting.spawn_again() {
                        Ok((process, end)) => self.life = Life::Lives(process, end),
                        Err(error) => {
                            let text = format!("the coordinator cannot be started again: {error}");
                            self.hosting.console.line(&text);
                            return how;
                        }
                    }
                }
            }
        }
    }

    /// Records a death, and says what follows.
    fn will_live_again(&mut self, how: ProcessExit) -> bool {
        let (now, window) = (clock::now(), COORDINATOR_WINDOW.as_secs());
        let Some((count, pause)) = self.restarts.allow(now, how) else {
            self.hosting.console.line(&format!(
                "the coordinator died again ({how}), {COORDINATOR_RESTARTS} times within {window} s: giving up"
            ));
            return false;
        };
        let when = if pause.is_zero() { String::new() } else { format!(" in {} s", pause.as_secs_f64()) };
        self.hosting.console.line(&format!(
            "the coordinator died ({how}) and is started again{when} (restart {count} of at most {COORDINATOR_RESTARTS} within {window} s); workers keep training"
        ));
        self.life = Life::Dead(how, now + pause);
        true
    }
}

impl HostConfig {
    /// What a coordinator is told that takes the place of one that died.
    const AGAIN: &str = "--restarted";
    /// What one is told that takes the place of another launcher's.
    pub const INSTEAD: &str = "--in-place-of";

    fn spawn_again(&mut self) -> io::Result<(ChildProcess, JoinHandle<ProcessExit>)> {
        // It takes the place of ours, and begins a takeover of the journal again that ours has begun.
        self.program.args.retain(|argument| !argument.starts_with(Self::INSTEAD));
        if !self.program.args.iter().any(|argument| argument == Self::AGAIN) {
            self.program.args.push(Self::AGAIN.to_owned());
        }
        self.spawn()
    }

    fn spawn(&self) -> io::Result<(ChildProcess, JoinHandle<ProcessExit>)> {
        let path = self.log_dir.join("coordinator.log");
        // Both streams write one file, which is shown once.
        let sink = |console| Sink { route: Route { file: true, console }, path: path.clone() };
        let console = Arc::clone(&self.console);
        let output = Output { stdout: sink(false), stderr: sink(true), console, prefix: String::new() };
        let socket = Stdio::from(OwnedFd::from(self.listener.try_clone()?));
        process::start(&self.program, socket, &output)
    }
}

/// Whether a coordinator ended otherwise than by its run's outcome: a signal, however it is told (128 + n is
/// how shells do), an internal error (1), a panic (101).
pub fn died(how: ProcessExit) -> bool {
    matches!(how, ProcessExit::Signal(_) | ProcessExit::Code(-1 | 1 | 101 | 129..))
}

/// How it died lately, and when.
#[derive(Debug)]
struct Restarts {
    lately: VecDeque<(Instant, ProcessExit)>,
    first_pause: Duration,
}

impl Restarts {
    /// Records a death; returns how many there were in the window, and what to wait before it is started
    /// again. None if there were too many.
    fn allow(&mut self, now: Instant, how: ProcessExit) -> Option<(usize, Duration)> {
        while self.lately.front().is_some_and(|(at, _)| now.duration_since(*at) >= COORDINATOR_WINDOW) {
            self.lately.pop_front();
        }
        if self.lately.len() >= COORDINATOR_RESTARTS {
            return None;
        }
        let errors = self.lately.iter().filter(|(_, how)| *how != KILLED).count();
        let pause = if how == KILLED { Duration::ZERO } else { self.first_pause * (1 << errors) };
        self.lately.push_back((now, how));
        Some((self.lately.len(), pause))
    }
}

/// By another launcher.
const KILLED: ProcessExit = ProcessExit::Signal(nix::libc::SIGKILL);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::supervise::console::Recorder;

    fn host(script: &str, dir: &std::path::Path) -> (Host, Arc<Recorder>) {
        host_told(script, &[], dir)
    }

    fn host_told(script: &str, told: &[&str], dir: &std::path::Path) -> (Host, Arc<Recorder>) {
        let args = ["-c", script, "sh"].into_iter().chain(told.iter().copied()).map(str::to_owned);
        let console = Arc::new(Recorder::default());
        let hosting = HostConfig {
            program: Program {
                path: "/bin/sh".into(),
                args: args.collect(),
                env: vec![("DIR", dir.display().to_string())],
            },
            listener: TcpListener::bind("127.0.0.1:0").unwrap(),
            log_dir: dir.to_owned(),
            console: console.clone(),
        };
        (Host::pausing(hosting, Duration::from_millis(1)).unwrap(), console)
    }

    fn block_on<T>(future: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
    }

    #[test]
    fn only_so_many_restarts_fit_in_a_window() {
        let mut restarts = Restarts { lately: VecDeque::new(), first_pause: FIRST_PAUSE };
        let start = Instant::now();
        let mut at = |second: u64| restarts.allow(start + Duration::from_secs(second), KILLED);
        let deaths = [0, 1, 2, 3, 4].map(&mut at);
        assert_eq!(deaths, [1, 2, 3, 4, 5].map(|count| Some((count, Duration::ZERO))));
        assert_eq!(at(59), None);
        assert_eq!(at(61), Some((4, Duration::ZERO)), "two have left the window");
    }

    #[test]
    fn errors_of_its_own_are_given_time_to_pass_and_a_kill_is_not() {
        let mut restarts = Restarts { lately: VecDeque::new(), first_pause: FIRST_PAUSE };
        let start = Instant::now();
        let mut pause = |how| restarts.allow(start, how).map(|(_, pause)| pause.as_secs());
        let (full_disk, panic) = (ProcessExit::Code(1), ProcessExit::Code(101));
        let pauses = [full_disk, KILLED, panic, full_disk, full_disk].map(&mut pause);
        assert_eq!(pauses, [1, 0, 2, 4, 8].map(Some));
        assert_eq!(pause(full_disk), None);
    }

    #[test]
    fn a_coordinator_that_dies_is_started_again_until_it_ends_with_an_outcome() {
        let dir = tempfile::tempdir().unwrap();
        let script = "echo life >> $DIR/lives; [ $(wc -l < $DIR/lives) -ge 3 ] && exit 4; kill -9 $$";
        let (how, lines) = block_on(async {
            let (mut host, console) = host(script, dir.path());
            (host.ended().await, console.lines())
        });
        assert_eq!(how, ProcessExit::Code(4));
        assert_eq!(lines.len(), 2, "{lines:?}");
        assert!(
            lines[1].contains("SIGKILL") && lines[1].contains("(restart 2 of at most 5 within 60 s)"),
            "{lines:?}"
        );
    }

    #[test]
    fn one_that_was_started_in_place_of_another_launchers_is_started_again_in_place_of_ours() {
        let dir = tempfile::tempdir().unwrap();
        let script = "echo \"$@\" >> $DIR/lives; [ $(wc -l < $DIR/lives) -ge 3 ] && exit 0; kill -9 $$";
        block_on(async {
            let (mut host, _) = host_told(script, &["--claim=2", "--in-place-of=theirs"], dir.path());
            host.ended().await
        });
        let lives = std::fs::read_to_string(dir.path().join("lives")).unwrap();
        assert_eq!(lives, "--claim=2 --in-place-of=theirs\n--claim=2 --restarted\n--claim=2 --restarted\n");
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
        assert_eq!(how, ProcessExit::Signal(9));
    }

    #[test]
    fn one_that_is_dismissed_while_it_is_dead_stays_dead() {
        let dir = tempfile::tempdir().unwrap();
        let how = block_on(async {
            let (mut host, _) = host("exit 143", dir.path());
            host.restarts.first_pause = Duration::from_secs(1000);
            let paused = tokio::time::timeout(Duration::from_secs(60), async {
                while host.restarts.lately.is_empty() {
                    let _ = tokio::time::timeout(Duration::from_millis(10), host.ended()).await;
                }
            });
            paused.await.expect("it dies");
            host.dismiss();
            host.ended().await
        });
        assert_eq!(how, ProcessExit::Code(143), "a signal, as a shell tells it");
    }
}
