//! What to do when a worker ends, a signal arrives or patience runs out. Pure: no process, clock or RPC in here.
//!
//! ```text
//!            signal ─▶ ask the run to stop ──patience──▶ SIGTERM ──patience──▶ SIGKILL
//! Running ─┤
//!            failure ─▶ tell the coordinator ──patience──▶ SIGTERM ──patience──▶ SIGKILL
//!
//! a second signal: SIGKILL at once
//! ```

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

/// How long a worker may take to leave after another one failed: the coordinator's abort reaches it within a heartbeat, and the
/// failed rank's error must be written first.
pub const ABORT_PATIENCE: Duration = Duration::from_secs(10);
/// How long a worker may take to die of SIGTERM.
pub const TERM_PATIENCE: Duration = Duration::from_secs(5);

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// With this exit code.
    Code(i32),
    /// By this signal.
    Signal(i32),
}

impl Ended {
    /// Whether all was well.
    pub fn is_success(self) -> bool {
        self == Self::Code(0)
    }
}

impl From<std::process::ExitStatus> for Ended {
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
    WorkerEnded(u32, Ended),
    /// The launcher received this signal.
    Signal(i32),
    /// The run could not be asked to stop.
    StopRefused,
    /// The coordinator has ended; `lost` if it died and could not be started again.
    CoordinatorEnded {
        /// Whether it died.
        lost: bool,
    },
    /// Time has passed.
    Tick,
}

/// Something to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Ask the coordinator to stop the run, because of this signal.
    AskStop(i32),
    /// Send this signal to every living worker's process group.
    SignalAll(i32),
    /// Tell the coordinator how a worker ended.
    ReportExit(u32, Ended),
}

const SIGTERM: i32 = nix::libc::SIGTERM;
const SIGKILL: i32 = nix::libc::SIGKILL;

/// The decisions of one launcher.
#[derive(Debug)]
pub struct Machine {
    ended: BTreeMap<u32, Option<Ended>>,
    first_failure: Option<(u32, Ended)>,
    interrupted: Option<i32>,
    coordinator_lost: bool,
    /// The strongest signal sent to all so far; what ends by it is no failure of its own.
    sent: Option<i32>,
    deadline: Option<Instant>,
    stop_patience: Duration,
}

impl Machine {
    /// A launcher of `workers` running workers that gives them `stop_patience` to leave after a signal.
    pub fn new(workers: u32, stop_patience: Duration) -> Self {
        Self {
            ended: (0..workers).map(|worker| (worker, None)).collect(),
            first_failure: None,
            interrupted: None,
            coordinator_lost: false,
            sent: None,
            deadline: None,
            stop_patience,
        }
    }

    /// Decides.
    pub fn handle(&mut self, now: Instant, event: Event) -> Vec<Action> {
        match event {
            Event::WorkerEnded(worker, how) => self.worker_ended(now, worker, how),
            Event::Signal(signal) if self.interrupted.is_none() => {
                self.interrupted = Some(signal);
                self.deadline = Some(now + self.stop_patience);
                vec![Action::AskStop(signal)]
            }
            Event::Signal(_) => self.signal_all(now, SIGKILL),
            Event::StopRefused => match self.interrupted {
                Some(signal) if self.sent.is_none() => self.forward(signal),
                _ => Vec::new(),
            },
            Event::CoordinatorEnded { lost: true } => {
                self.coordinator_lost = true;
                self.signal_all(now, SIGTERM)
            }
            Event::CoordinatorEnded { lost: false } => {
                // The run is over: a worker that is still there has been told, or will not be.
                self.deadline.get_or_insert(now + ABORT_PATIENCE);
                Vec::new()
            }
            Event::Tick => match self.deadline {
                Some(deadline) if now >= deadline && self.sent == Some(SIGTERM) => {
                    self.signal_all(now, SIGKILL)
                }
                Some(deadline) if now >= deadline => self.signal_all(now, SIGTERM),
                _ => Vec::new(),
            },
        }
    }

    fn worker_ended(&mut self, now: Instant, worker: u32, how: Ended) -> Vec<Action> {
        self.ended.insert(worker, Some(how));
        if how.is_success() {
            return Vec::new();
        }
        if self.first_failure.is_none() && self.sent.is_none() {
            self.first_failure = Some((worker, how));
            if self.interrupted.is_none() {
                self.deadline = Some(now + ABORT_PATIENCE);
            }
        }
        vec![Action::ReportExit(worker, how)]
    }

    /// A signal of the user's, passed on as it is; patience keeps running.
    fn forward(&mut self, signal: i32) -> Vec<Action> {
        self.sent = Some(signal);
        vec![Action::SignalAll(signal)]
    }

    fn signal_all(&mut self, now: Instant, signal: i32) -> Vec<Action> {
        self.deadline = (signal != SIGKILL).then(|| now + TERM_PATIENCE);
        self.forward(signal)
    }

    /// When [`Event::Tick`] is due.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.deadline.filter(|_| !self.all_ended())
    }

    /// Whether there is nothing left to wait for.
    pub fn all_ended(&self) -> bool {
        self.ended.values().all(Option::is_some)
    }

    /// Workers that still run.
    pub fn living(&self) -> impl Iterator<Item = u32> + '_ {
        self.ended.iter().filter(|(_, how)| how.is_none()).map(|(worker, _)| *worker)
    }

    /// The first worker of ours that failed by itself.
    pub fn first_failure(&self) -> Option<(u32, Ended)> {
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
mod tests {
    use super::*;

    const SIGINT: i32 = nix::libc::SIGINT;
    const STOP: Duration = Duration::from_secs(30);

    /// Runs a transcript of (seconds, event, expected actions).
    fn transcript(workers: u32, steps: &[(u64, Event, &[Action])]) -> Machine {
        let mut machine = Machine::new(workers, STOP);
        let start = Instant::now();
        for (seconds, event, expected) in steps {
            let actions = machine.handle(start + Duration::from_secs(*seconds), *event);
            assert_eq!(actions, *expected, "after {event:?} at {seconds} s");
        }
        machine
    }

    const DONE: Ended = Ended::Code(0);

    #[test]
    fn a_run_that_ends_well_asks_for_nothing() {
        let machine =
            transcript(2, &[(0, Event::WorkerEnded(1, DONE), &[]), (1, Event::WorkerEnded(0, DONE), &[])]);
        assert!(machine.all_ended());
        assert_eq!(machine.first_failure(), None);
        assert_eq!(machine.next_deadline(), None);
    }

    #[test]
    fn a_failure_is_reported_and_the_others_get_time_to_leave() {
        let killed = Ended::Signal(9);
        let machine = transcript(
            3,
            &[
                (0, Event::WorkerEnded(1, killed), &[Action::ReportExit(1, killed)]),
                (1, Event::WorkerEnded(0, Ended::Code(4)), &[Action::ReportExit(0, Ended::Code(4))]),
                (9, Event::Tick, &[]),
                (10, Event::Tick, &[Action::SignalAll(SIGTERM)]),
                (14, Event::Tick, &[]),
                (15, Event::Tick, &[Action::SignalAll(SIGKILL)]),
                (16, Event::WorkerEnded(2, killed), &[Action::ReportExit(2, killed)]),
            ],
        );
        assert_eq!(machine.first_failure(), Some((1, killed)));
        assert!(machine.all_ended());
    }

    #[test]
    fn the_first_signal_stops_gracefully_and_the_second_kills() {
        let machine = transcript(
            1,
            &[
                (0, Event::Signal(SIGINT), &[Action::AskStop(SIGINT)]),
                (5, Event::Tick, &[]),
                (6, Event::Signal(SIGINT), &[Action::SignalAll(SIGKILL)]),
                (6, Event::WorkerEnded(0, Ended::Signal(9)), &[Action::ReportExit(0, Ended::Signal(9))]),
            ],
        );
        assert_eq!(machine.interrupted(), Some(SIGINT));
        assert_eq!(machine.first_failure(), None, "what we killed did not fail");
    }

    #[test]
    fn a_stop_that_takes_too_long_is_enforced() {
        transcript(
            1,
            &[
                (0, Event::Signal(SIGTERM), &[Action::AskStop(SIGTERM)]),
                (29, Event::Tick, &[]),
                (30, Event::Tick, &[Action::SignalAll(SIGTERM)]),
                (35, Event::Tick, &[Action::SignalAll(SIGKILL)]),
                (99, Event::Tick, &[]),
            ],
        );
    }

    #[test]
    fn without_a_coordinator_the_signal_itself_is_passed_on() {
        transcript(
            1,
            &[
                (0, Event::Signal(SIGINT), &[Action::AskStop(SIGINT)]),
                (0, Event::StopRefused, &[Action::SignalAll(SIGINT)]),
                (1, Event::StopRefused, &[]),
                (30, Event::Tick, &[Action::SignalAll(SIGTERM)]),
            ],
        );
    }

    #[test]
    fn workers_without_a_coordinator_are_ended() {
        let machine =
            transcript(1, &[(0, Event::CoordinatorEnded { lost: true }, &[Action::SignalAll(SIGTERM)])]);
        assert!(machine.coordinator_lost());
        assert_eq!(machine.living().collect::<Vec<_>>(), [0]);
    }

    #[test]
    fn a_worker_that_stays_when_the_run_is_over_is_ended() {
        transcript(
            1,
            &[
                (0, Event::CoordinatorEnded { lost: false }, &[]),
                (9, Event::Tick, &[]),
                (10, Event::Tick, &[Action::SignalAll(SIGTERM)]),
            ],
        );
    }

    #[test]
    fn a_failure_during_a_stop_keeps_the_stops_patience() {
        let failed = Ended::Code(1);
        let machine = transcript(
            2,
            &[
                (0, Event::Signal(SIGINT), &[Action::AskStop(SIGINT)]),
                (5, Event::WorkerEnded(0, failed), &[Action::ReportExit(0, failed)]),
                (16, Event::Tick, &[]),
            ],
        );
        assert_eq!(machine.first_failure(), Some((0, failed)));
    }
}
