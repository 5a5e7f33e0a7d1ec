//! What to do when a worker ends, an order or a signal arrives, or patience runs out. Pure: no process, clock
//! or RPC in here.
//!
//! ```text
//! worker ends  ─▶ tell the coordinator; it orders another in its place, or ends the run
//! order        ─▶ kill what is left of the worker ─▶ start it again
//! run is over  ─▶ patience ─▶ kill them all       our coordinator has ended with it: the patience is short
//! signal       ─▶ ask the run to stop ─▶ patience ─▶ kill them all
//!
//! a second signal: kill them all at once
//! ```
//!
//! Workers ignore the signals that ask (`child`): to end one is to kill it.
//!
//! A worker that ended is no failure of the launch as long as the run goes on: nothing is started again by a
//! decision of the launcher's own, and nothing is ended because of it.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use super::signals;

/// How long a worker may take to leave when the run is over: the coordinator's word reaches it within a
/// heartbeat, and the failed rank's error must be written first.
pub const LEAVE_PATIENCE: Duration = Duration::from_secs(10);
/// How long a worker may still be there when our coordinator has ended: it waited for those that wanted to
/// tell it something, so one that is left looks for it in vain, or writes down its error.
pub const ORPHAN_PATIENCE: Duration = Duration::from_millis(500);

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProcessExit {
    /// With this exit code.
    Code(i32),
    /// By this signal.
    Signal(i32),
}

impl ProcessExit {
    /// Whether all was well.
    pub fn is_success(self) -> bool {
        self == Self::Code(0)
    }
}

impl std::fmt::Display for ProcessExit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Code(code) => write!(f, "exit code {code}"),
            Self::Signal(signal) => f.write_str(&signals::name(*signal)),
        }
    }
}

impl From<std::process::ExitStatus> for ProcessExit {
    fn from(status: std::process::ExitStatus) -> Self {
        use std::os::unix::process::ExitStatusExt;
        match (status.code(), status.signal()) {
            (Some(code), _) => Self::Code(code),
            (None, signal) => Self::Signal(signal.unwrap_or(0)),
        }
    }
}

/// Something that happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// The worker of this number among ours ended.
    WorkerEnded(u32, ProcessExit),
    /// The coordinator wants another process in this worker's place.
    Respawn {
        /// Number among ours.
        worker: u32,
        /// Which start this is, not counting the first; a number seen before is a replay.
        attempt: u32,
    },
    /// The launcher received this signal.
    Signal(i32),
    /// The run could not be asked to stop.
    StopRefused,
    /// The run has ended, well or not.
    RunOver,
    /// Our coordinator has ended with the run.
    CoordinatorEnded,
    /// The coordinator is gone and does not come back, or has given our place to another.
    CoordinatorLost,
    /// Time has passed.
    Tick,
}

/// Something to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Ask the coordinator to stop the run, because of this signal.
    AskStop(i32),
    /// Kill every living worker, with its process group.
    KillAll(KillReason),
    /// Kill this worker, with its process group.
    Kill(u32),
    /// Start this worker again, for the given time.
    Start(u32, u32),
    /// Tell the coordinator how a worker ended.
    ReportExit(u32, ProcessExit),
}

/// Why all workers are killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KillReason {
    /// A second signal asks for it.
    Insisted,
    /// The run did not stop within its patience.
    StopTookTooLong,
    /// The run could not be asked to stop.
    StopRefused,
    /// They are still there though the run is over.
    RunOver,
    /// They have no coordinator any more.
    CoordinatorLost,
}

/// One worker of ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Worker {
    Running,
    /// Killed, to be started again as soon as it has ended.
    Replaced,
    Ended(ProcessExit),
}

/// The decisions of one launcher.
#[derive(Debug)]
pub struct Machine {
    workers: BTreeMap<u32, Worker>,
    /// The newest start of each worker that was ordered.
    attempts: BTreeMap<u32, u32>,
    first_failure: Option<(u32, ProcessExit)>,
    interrupted: Option<i32>,
    coordinator_lost: bool,
    run_over: bool,
    /// Whether all were killed; what ends after that is no failure of its own.
    killed: bool,
    deadline: Option<Instant>,
    stop_patience: Duration,
}

impl Machine {
    /// A launcher of `workers` running workers that gives them `stop_patience` to leave after a signal.
    pub fn new(workers: u32, stop_patience: Duration) -> Self {
        Self {
            workers: (0..workers).map(|worker| (worker, Worker::Running)).collect(),
            attempts: BTreeMap::new(),
            first_failure: None,
            interrupted: None,
            coordinator_lost: false,
            run_over: false,
            killed: false,
            deadline: None,
            stop_patience,
        }
    }

    /// Decides.
    pub fn handle(&mut self, now: Instant, event: Event) -> Vec<Action> {
        match event {
            Event::WorkerEnded(worker, how) => self.worker_ended(worker, how),
            Event::Respawn { worker, attempt } => self.respawn(worker, attempt),
            Event::Signal(signal) if self.interrupted.is_none() => {
                self.interrupted = Some(signal);
                self.deadline = Some(now + self.stop_patience);
                vec![Action::AskStop(signal)]
            }
            Event::Signal(signal) => {
                let first = self.interrupted.unwrap_or(signal);
                if signals::insists_after(first, signal) {
                    return self.kill_all(KillReason::Insisted);
                }
                if signals::insists(signal) {
                    self.interrupted = Some(signal);
                }
                Vec::new()
            }
            Event::StopRefused if self.killed => Vec::new(),
            Event::StopRefused => self.kill_all(KillReason::StopRefused),
            Event::RunOver => {
                // A worker that is still there has been told, or will not be.
                self.leave_by(now + LEAVE_PATIENCE);
                Vec::new()
            }
            Event::CoordinatorEnded => {
                self.leave_by(now + ORPHAN_PATIENCE);
                Vec::new()
            }
            Event::CoordinatorLost => {
                self.coordinator_lost = true;
                self.kill_all(KillReason::CoordinatorLost)
            }
            Event::Tick => match self.deadline {
                Some(deadline) if now >= deadline && self.run_over => self.kill_all(KillReason::RunOver),
                Some(deadline) if now >= deadline => self.kill_all(KillReason::StopTookTooLong),
                _ => Vec::new(),
            },
        }
    }

    /// The run is over: who is there after that, or after an earlier deadline, is killed.
    fn leave_by(&mut self, at: Instant) {
        self.run_over = true;
        if !self.killed {
            self.deadline = Some(self.deadline.map_or(at, |deadline| deadline.min(at)));
        }
    }

    fn worker_ended(&mut self, worker: u32, how: ProcessExit) -> Vec<Action> {
        let before = self.workers.insert(worker, Worker::Ended(how));
        match (before, self.attempts.get(&worker)) {
            // The coordinator counts it as lost already: an exit reported now could be taken for its
            // successor's.
            (Some(Worker::Replaced), Some(&attempt)) if !self.ending() => {
                self.workers.insert(worker, Worker::Running);
                vec![Action::Start(worker, attempt)]
            }
            (Some(Worker::Replaced), _) => Vec::new(),
            _ => {
                if self.first_failure.is_none() && !self.killed && !how.is_success() {
                    self.first_failure = Some((worker, how));
                }
                vec![Action::ReportExit(worker, how)]
            }
        }
    }

    fn respawn(&mut self, worker: u32, attempt: u32) -> Vec<Action> {
        let replay = self.attempts.get(&worker).is_some_and(|newest| attempt <= *newest);
        let Some(state) = self.workers.get(&worker).copied().filter(|_| !replay && !self.ending()) else {
            return Vec::new();
        };
        self.attempts.insert(worker, attempt);
        if self.first_failure.is_some_and(|(failed, _)| failed == worker) {
            self.first_failure = None;
        }
        match state {
            Worker::Running => {
                self.workers.insert(worker, Worker::Replaced);
                vec![Action::Kill(worker)]
            }
            Worker::Replaced => Vec::new(),
            Worker::Ended(_) => {
                self.workers.insert(worker, Worker::Running);
                vec![Action::Start(worker, attempt)]
            }
        }
    }

    fn kill_all(&mut self, why: KillReason) -> Vec<Action> {
        (self.killed, self.deadline) = (true, None);
        vec![Action::KillAll(why)]
    }

    /// Whether workers are not started again any more.
    fn ending(&self) -> bool {
        self.run_over || self.coordinator_lost || self.killed
    }

    /// Whether the run is to go on here, as far as is known.
    pub fn goes_on(&self) -> bool {
        !self.ending() && !self.finished() && self.interrupted.is_none()
    }

    /// When [`Event::Tick`] is due.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.deadline.filter(|_| !self.finished())
    }

    /// Whether there is nothing left to wait for: all workers have ended, and none of them can be wanted
    /// again.
    pub fn finished(&self) -> bool {
        let mut ends = self.workers.values().map(|worker| match worker {
            Worker::Ended(how) => Some(how),
            _ => None,
        });
        ends.all(|end| end.is_some_and(|how| self.ending() || how.is_success()))
    }

    /// Workers that still run.
    pub fn living(&self) -> impl Iterator<Item = u32> + '_ {
        let living = self.workers.iter().filter(|(_, state)| !matches!(state, Worker::Ended(_)));
        living.map(|(worker, _)| *worker)
    }

    /// The first worker of ours that failed by itself and was not replaced.
    pub fn first_failure(&self) -> Option<(u32, ProcessExit)> {
        self.first_failure
    }

    /// The signal that ended the run, if one did.
    pub fn interrupted(&self) -> Option<i32> {
        self.interrupted
    }

    /// Whether the coordinator was lost.
    pub fn coordinator_lost(&self) -> bool {
        self.coordinator_lost
    }
}

#[cfg(test)]
mod tests;
