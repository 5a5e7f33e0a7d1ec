//! The link's two ends.
//!
//! The session writes what it was told into a shared [`Standing`]; the trainer reads it, and sleeps on a
//! condition variable where it has to wait. The other way goes a bounded queue of reports.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, atomic::Ordering};

use coxswain_proto::{
    ids::{Generation, Rank, Step},
    plan,
};
use tokio::sync::mpsc;

use super::standing::{Lease, Notice, Standing};
use crate::{
    collective::{AbortHandle, Progress},
    link::{Assignment, Commands, Link, LinkError, Phase, Report, StepShare, spans},
};
use coxswain_nn::pulse::Pulse;

/// The standing, and everything heartbeats need.
#[derive(Default)]
struct ChannelState {
    standing: Standing,
    at: Option<(Phase, Step)>,
    communicator: Option<(Arc<dyn AbortHandle>, Arc<Progress>)>,
}

/// Shared by the session and the trainer's [`ChannelLink`].
#[derive(Default)]
pub(super) struct SharedChannel {
    state: Mutex<ChannelState>,
    changed: Condvar,
    /// Whether the trainer moves.
    pub pulse: Arc<Pulse>,
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

/// One thing that the trainer says, in the order in which it says it.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "nearly all of them are reports of steps, the largest variant")]
pub(super) enum Message {
    /// It can take a place; it has left this generation, and found out why by itself if there is a reason.
    Ready { left: Generation, why: String },
    /// A report of a rank of this generation.
    Report(Generation, Report),
}

impl SharedChannel {
    fn lock(&self) -> MutexGuard<'_, ChannelState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a directive in.
    pub fn told(&self, told: Notice) {
        let over = {
            let mut state = self.lock();
            let ends = state.standing.told(told);
            ends.then(|| (state.standing.alive(), state.communicator.clone()))
        };
        if let Some((Err(why), Some((abort, _)))) = over {
            abort.abort(&why.to_string());
        }
        self.changed.notify_all();
    }

    /// The line is cut: the trainer returns as soon as it looks, and a collective in flight ends now.
    pub fn cut(&self, why: LinkError) {
        let communicator = {
            let mut state = self.lock();
            state.standing.cut(why.clone());
            state.communicator.clone()
        };
        if let Some((abort, _)) = communicator {
            abort.abort(&why.to_string());
        }
        self.changed.notify_all();
    }

    /// Whether the trainer's generation, and the run, go on.
    pub fn is_alive(&self) -> bool {
        self.lock().standing.alive().is_ok()
    }

    /// Whether a place in a generation newer than `left` has been given.
    pub fn has_place_after(&self, left: Generation) -> bool {
        self.lock().standing.has_place_after(left)
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
            generation: state.standing.generation(),
            phase,
            step,
            entered: count(|progress| &progress.entered),
            finished: count(|progress| &progress.finished),
        }
    }

    /// Blocks until `ready` has an answer.
    fn wait<V>(&self, mut ready: impl FnMut(&mut Standing) -> Option<V>) -> V {
        self.pulse.waiting(|| {
            let mut state = self.lock();
            loop {
                if let Some(value) = ready(&mut state.standing) {
                    return value;
                }
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
        })
    }
}

/// The trainer's end.
pub(super) struct ChannelLink {
    shared: Arc<SharedChannel>,
    message: mpsc::Sender<Message>,
    run_id: String,
    /// Place, for reports.
    place: (Generation, Rank),
}

impl ChannelLink {
    pub fn new(shared: Arc<SharedChannel>, message: mpsc::Sender<Message>, run_id: String) -> Self {
        Self { shared, message, run_id, place: (Generation(0), Rank(0)) }
    }

    fn say(&self, message: Message) -> Result<(), LinkError> {
        let closed = || LinkError::Lost("the session has ended".into());
        self.shared.pulse.waiting(|| self.message.blocking_send(message).map_err(|_| closed()))
    }
}

impl Link for ChannelLink {
    fn run_id(&self) -> &str {
        &self.run_id
    }

    fn assignment(&mut self, why: Option<&str>) -> Result<Assignment, LinkError> {
        let why = why.unwrap_or_default().to_owned();
        let message = self.say(Message::Ready { left: self.place.0, why });
        // A session that has ended has said why.
        let assignment = self.shared.wait(|standing| match &message {
            Ok(()) => standing.enter(),
            Err(error) => Some(standing.alive().and(Err(error.clone()))),
        })?;
        self.place = (assignment.generation, assignment.rank);
        spans::generation(&assignment);
        // How far it had come in the old ring says nothing about where it is in the new one.
        self.shared.lock().communicator = None;
        Ok(assignment)
    }

    fn lease(&mut self, step: Step, samples: u64) -> Result<StepShare, LinkError> {
        let lease = self.shared.wait(|standing| standing.lease(step))?;
        Ok(share(lease, samples))
    }

    fn lease_ahead(&mut self, step: Step, samples: u64) -> Result<Option<StepShare>, LinkError> {
        let lease = self.shared.lock().standing.lease(step).transpose()?;
        Ok(lease.map(|lease| share(lease, samples)))
    }

    fn connected(&mut self, abort: Arc<dyn AbortHandle>, progress: Arc<Progress>) {
        let alive = {
            let mut state = self.shared.lock();
            state.communicator = Some((abort.clone(), progress));
            state.standing.alive()
        };
        if let Err(why) = alive {
            abort.abort(&why.to_string());
        }
    }

    fn commands(&mut self) -> Commands {
        self.shared.lock().standing.commands()
    }

    fn wait_while_paused(&mut self) -> Result<(), LinkError> {
        self.shared.wait(|standing| standing.unpaused())
    }

    fn at(&mut self, phase: Phase, step: Step) {
        spans::phase(phase, step);
        self.shared.lock().at = Some((phase, step));
        self.shared.pulse.enter(phase);
        super::hold::at(phase, step);
    }

    fn report(&mut self, report: Report) -> Result<(), LinkError> {
        self.say(Message::Report(self.place.0, report))
    }
}

/// A lease's part of a batch of `samples` samples.
fn share(lease: Lease, samples: u64) -> StepShare {
    StepShare { slice: plan::slice(samples, lease.slice, lease.slices), cache_phase: lease.cache_phase }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use coxswain_proto::cache_plan::CacheGeneration;

    use super::*;
    use crate::link::{CacheNamespace, CachePhase};

    fn link() -> (Arc<SharedChannel>, ChannelLink, mpsc::Receiver<Message>) {
        let shared = Arc::new(SharedChannel::default());
        let (message, queue) = mpsc::channel(4);
        (shared.clone(), ChannelLink::new(shared, message, "run-1".into()), queue)
    }

    fn assign(shared: &SharedChannel) {
        shared.told(Notice::Assign(Assignment {
            generation: Generation(1),
            rank: Rank(1),
            world: 2,
            next: "b".into(),
            quarantined: Vec::new(),
            checkpoint_step: Step(0),
            closing: false,
            replica_distance: 1,
        }));
    }

    fn grant(shared: &SharedChannel, steps: Range<u64>) {
        let cache_phase = CachePhase::LIVE;
        shared.told(Notice::Grant(Lease {
            generation: Generation(1),
            steps,
            slice: Rank(1),
            slices: 2,
            cache_phase,
        }));
    }

    #[test]
    fn a_trainer_waits_for_its_lease_and_gets_its_slice() {
        let (shared, mut link, _queue) = link();
        assign(&shared);
        let trainer = std::thread::spawn(move || {
            link.assignment(None)?;
            link.lease(Step(33), 7)
        });
        grant(&shared, 0..32);
        grant(&shared, 32..64);
        let leased = StepShare { slice: 3..7, cache_phase: CachePhase::LIVE };
        assert_eq!(trainer.join().expect("no panic"), Ok(leased));
    }

    #[test]
    fn a_step_is_asked_for_ahead_without_waiting_and_a_newer_lease_of_it_says_more_of_its_cache_phase() {
        let (shared, mut link, _queue) = link();
        assign(&shared);
        link.assignment(None).expect("there is a place");
        grant(&shared, 0..4);
        assert_eq!(link.lease_ahead(Step(4), 7), Ok(None));
        let generation = CacheGeneration { number: 1, since: Step(4) };
        for (steps, namespace) in [(4..8, None), (5..8, Some("5f".to_owned()))] {
            let cache_phase = CachePhase::Cached(CacheNamespace { generation, namespace });
            let generation = Generation(1);
            shared.told(Notice::Grant(Lease { generation, steps, slice: Rank(1), slices: 2, cache_phase }));
        }
        let mut namespace = |step| match link.lease_ahead(Step(step), 7) {
            Ok(Some(StepShare { cache_phase: CachePhase::Cached(namespace), .. })) => namespace.namespace,
            other => panic!("{other:?}"),
        };
        assert_eq!((namespace(4), namespace(5)), (None, Some("5f".into())));
        assert!(matches!(link.lease(Step(4), 7), Ok(StepShare { slice, .. }) if slice == (3..7)));
    }

    #[test]
    fn an_abort_wakes_a_waiting_trainer() {
        let (shared, mut link, _queue) = link();
        assign(&shared);
        link.assignment(None).expect("there is a place");
        let trainer = std::thread::spawn(move || link.lease(Step(0), 4));
        shared.told(Notice::Abort(Generation(1), "rank 0 is gone".into()));
        assert_eq!(trainer.join().expect("no panic"), Err(LinkError::Aborted("rank 0 is gone".into())));
    }

    #[test]
    fn an_abort_before_the_ring_is_formed_still_reaches_it() {
        struct AbortRecorder(Mutex<String>);
        impl AbortHandle for AbortRecorder {
            fn abort(&self, reason: &str) {
                *self.0.lock().expect("no panic") = reason.to_owned();
            }
        }
        let (shared, mut link, _queue) = link();
        assign(&shared);
        link.assignment(None).expect("there is a place");
        shared.told(Notice::Abort(Generation(1), "over".into()));
        let heard = Arc::new(AbortRecorder(Mutex::default()));
        link.connected(heard.clone(), Arc::default());
        assert!(heard.0.lock().expect("no panic").contains("over"));
    }

    #[test]
    fn a_paused_trainer_goes_on_when_stopped() {
        let (shared, mut link, _queue) = link();
        shared.told(Notice::Pause);
        let trainer = std::thread::spawn(move || link.wait_while_paused());
        shared.told(Notice::Stop);
        assert_eq!(trainer.join().expect("no panic"), Ok(()));
    }

    #[test]
    fn a_session_that_has_ended_says_why() {
        let (shared, mut link, queue) = link();
        drop(queue);
        shared.cut(LinkError::Over("rank 1 failed".into()));
        assert_eq!(link.assignment(None), Err(LinkError::Over("rank 1 failed".into())));
    }
}
