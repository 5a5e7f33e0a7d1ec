//! The link's two ends.
//!
//! The session writes what it was told into a shared state; the trainer reads it, and sleeps on a condition variable where it has to
//! wait. The other way goes a bounded queue of reports.

use std::{
    ops::Range,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, atomic::Ordering},
};

use coxswain_proto::{
    ids::{Generation, Rank, Step},
    plan,
};
use tokio::sync::mpsc;

use crate::{
    collective::{AbortHandle, Progress},
    link::{Assignment, Commands, Link, LinkError, Phase, Report},
};

/// One lease, as granted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Lease {
    pub steps: Range<u64>,
    pub slice: u32,
    pub slices: u32,
}

/// Everything the session has been told, and everything heartbeats need.
#[derive(Default)]
struct State {
    assignment: Option<Assignment>,
    leases: Vec<Lease>,
    commands: Commands,
    at: Option<(Phase, Step)>,
    communicator: Option<(Arc<dyn AbortHandle>, Arc<Progress>)>,
    ended: Option<LinkError>,
}

/// Shared by the session and the trainer's [`ChannelLink`].
#[derive(Default)]
pub(super) struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

/// Where the trainer is, for a heartbeat.
#[derive(Clone, Copy, Debug)]
pub(super) struct Position {
    pub generation: Generation,
    pub phase: Phase,
    pub step: Step,
    pub entered: u64,
    pub finished: u64,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.lock());
        self.changed.notify_all();
    }

    /// The membership is complete. A replay of the same assignment changes nothing.
    pub fn assign(&self, assignment: Assignment) {
        self.change(|state| {
            if state.assignment.as_ref().is_none_or(|old| old.generation != assignment.generation) {
                state.leases.clear();
                state.assignment = Some(assignment);
            }
        });
    }

    /// More steps may be run. Leases that are used up are forgotten.
    pub fn grant(&self, lease: Lease) {
        self.change(|state| {
            let done = state.at.map_or(0, |(_, step)| step.0);
            state.leases.retain(|old| old.steps.end > done && old.steps != lease.steps);
            state.leases.push(lease);
        });
    }

    /// People want something.
    pub fn command(&self, change: impl FnOnce(&mut Commands)) {
        self.change(|state| change(&mut state.commands));
    }

    /// The line is cut: the trainer returns as soon as it looks, and a collective in flight ends now.
    pub fn end(&self, why: LinkError) {
        let communicator = {
            let mut state = self.lock();
            state.ended.get_or_insert_with(|| why.clone());
            state.communicator.clone()
        };
        if let Some((abort, _)) = communicator {
            abort.abort(&why.to_string());
        }
        self.changed.notify_all();
    }

    /// Where the trainer is.
    pub fn position(&self) -> Position {
        let state = self.lock();
        let (phase, step) = state.at.unwrap_or((Phase::Joining, Step(0)));
        let progress = state.communicator.as_ref().map(|(_, progress)| progress);
        let count = |of: fn(&Progress) -> &std::sync::atomic::AtomicU64| {
            progress.map_or(0, |progress| of(progress).load(Ordering::Relaxed))
        };
        Position {
            generation: state.assignment.as_ref().map_or(Generation(0), |assignment| assignment.generation),
            phase,
            step,
            entered: count(|progress| &progress.entered),
            finished: count(|progress| &progress.finished),
        }
    }

    /// Blocks until `ready` has an answer, or the line is cut.
    fn wait<V>(&self, ready: impl Fn(&State) -> Option<V>) -> Result<V, LinkError> {
        let mut state = self.lock();
        loop {
            if let Some(ended) = &state.ended {
                return Err(ended.clone());
            }
            if let Some(value) = ready(&state) {
                return Ok(value);
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// The trainer's end.
pub(super) struct ChannelLink {
    pub shared: Arc<Shared>,
    pub reports: mpsc::Sender<Report>,
}

impl Link for ChannelLink {
    fn assignment(&mut self) -> Result<Assignment, LinkError> {
        self.shared.wait(|state| state.assignment.clone())
    }

    fn lease(&mut self, step: Step, samples: u64) -> Result<Range<u64>, LinkError> {
        self.shared.wait(|state| {
            let lease = state.leases.iter().find(|lease| lease.steps.contains(&step.0))?;
            Some(plan::slice(samples, Rank(lease.slice), lease.slices))
        })
    }

    fn connected(&mut self, abort: Arc<dyn AbortHandle>, progress: Arc<Progress>) {
        let ended = {
            let mut state = self.shared.lock();
            state.communicator = Some((abort.clone(), progress));
            state.ended.clone()
        };
        if let Some(why) = ended {
            abort.abort(&why.to_string());
        }
    }

    fn commands(&mut self) -> Commands {
        self.shared.lock().commands
    }

    fn wait_while_paused(&mut self) -> Result<(), LinkError> {
        self.shared.wait(|state| (!state.commands.pause || state.commands.stop).then_some(()))
    }

    fn at(&mut self, phase: Phase, step: Step) {
        self.shared.lock().at = Some((phase, step));
        super::hold::at(phase, step);
    }

    fn report(&mut self, report: Report) -> Result<(), LinkError> {
        let closed = || LinkError::Lost("the session has ended".into());
        self.reports.blocking_send(report).map_err(|_| closed())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn link() -> (Arc<Shared>, ChannelLink, mpsc::Receiver<Report>) {
        let shared = Arc::new(Shared::default());
        let (reports, queue) = mpsc::channel(4);
        (shared.clone(), ChannelLink { shared, reports }, queue)
    }

    #[test]
    fn a_trainer_waits_for_its_lease_and_gets_its_slice() {
        let (shared, mut link, _queue) = link();
        let trainer = std::thread::spawn(move || link.lease(Step(33), 7));
        shared.grant(Lease { steps: 0..32, slice: 1, slices: 2 });
        shared.grant(Lease { steps: 32..64, slice: 1, slices: 2 });
        assert_eq!(trainer.join().expect("no panic"), Ok(3..7));
    }

    #[test]
    fn an_abort_wakes_a_waiting_trainer() {
        let (shared, mut link, _queue) = link();
        let trainer = std::thread::spawn(move || link.assignment());
        shared.end(LinkError::Aborted("rank 1 is gone".into()));
        assert_eq!(trainer.join().expect("no panic"), Err(LinkError::Aborted("rank 1 is gone".into())));
    }

    #[test]
    fn an_abort_before_the_ring_is_formed_still_reaches_it() {
        struct Told(Mutex<String>);
        impl AbortHandle for Told {
            fn abort(&self, reason: &str) {
                *self.0.lock().expect("no panic") = reason.to_owned();
            }
        }
        let (shared, mut link, _queue) = link();
        shared.end(LinkError::Aborted("over".into()));
        let told = Arc::new(Told(Mutex::default()));
        link.connected(told.clone(), Arc::default());
        assert!(told.0.lock().expect("no panic").contains("over"));
    }

    #[test]
    fn a_paused_trainer_goes_on_when_stopped() {
        let (shared, mut link, _queue) = link();
        shared.command(|commands| commands.pause = true);
        let trainer = std::thread::spawn(move || link.wait_while_paused());
        shared.command(|commands| commands.stop = true);
        assert_eq!(trainer.join().expect("no panic"), Ok(()));
    }
}
