//! Signs that the trainer moves, for heartbeats: what tells a rank that is slow from one that stands still.
//!
//! ```text
//! layers, tensors, files, batches, bytes in the ring           ── beat() ──▶ Pulse ── reading() ─▶ heartbeat
//! a call that cannot beat before it returns                    ── allow(bytes)  │
//! phases                                                       ── enter(phase) ─┘
//! a wait for another thread that has a pulse of its own         ── keeps_time_with(other)
//! ```
//!
//! Work that takes long beats while it lasts, and what it cannot beat in is given time by its size. So a
//! reading says how long the trainer has been still beyond what it may; and, of each phase that it has been
//! through, how long it was still at most, which is what its next visit, and its peers', can be expected to
//! take.
//!
//! The pulse of a worker is that of the thread that trains: [`Pulse::install`] names it there, so that
//! libraries below need not be handed one. Threads that the trainer waits for have pulses of their own, which
//! only the trainer looks at ([`keeps_time_with`]); on any other [`beat`] and [`allow`] are nothing.
//! What this file does not do: judge. The coordinator does, which sees all ranks.

use std::{
    cell::RefCell,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use coxswain_proto::report::WorkerPhase as Phase;

/// Bytes in a second below which a disk or a network counts as standing still: a tenth of a bad day.
const SLOWEST: f64 = 10e6;
/// How often a thread that waits for another should look whether that one gets on.
pub const LOOK: Duration = Duration::from_millis(100);

thread_local! {
    static CURRENT: RefCell<Option<Arc<Pulse>>> = const { RefCell::new(None) };
}

/// The trainer of this thread has got on.
pub fn beat() {
    with(Pulse::beat);
}

/// The trainer of this thread goes into something that cannot beat, over so many bytes.
pub fn allow(bytes: u64) {
    with(|pulse| pulse.allow(bytes));
}

/// The trainer of this thread waits for another one, and moves as far as that one does.
pub fn keeps_time_with(other: &Pulse) {
    if other.reading().still <= LOOK {
        beat();
    }
}

fn with(tell: impl FnOnce(&Pulse)) {
    CURRENT.with_borrow(|pulse| pulse.as_deref().map(tell));
}

/// The longest time without a sign of motion in each phase that was left, by [`Phase::ALL`]'s order.
pub type Longest = [Option<Duration>; Phase::ALL.len()];

/// One trainer's signs of motion.
#[derive(Debug)]
pub struct Pulse {
    begun: Instant,
    course: Mutex<Course>,
}

/// What a heartbeat says of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reading {
    /// How long the trainer has been still beyond what it may.
    pub still: Duration,
    /// It waits for the coordinator, for so long.
    pub waits: bool,
    /// How long it has been in its phase.
    pub in_phase: Duration,
    /// The longest times of the phases that it has been through.
    pub longest: Longest,
}

impl Default for Pulse {
    fn default() -> Self {
        Self { begun: Instant::now(), course: Mutex::default() }
    }
}

impl Pulse {
    /// Makes it the pulse of this thread.
    pub fn install(self: Arc<Self>) {
        CURRENT.with_borrow_mut(|current| *current = Some(self));
    }

    /// It has got on.
    pub fn beat(&self) {
        self.course().beat(self.now());
    }

    /// It goes into something that cannot beat, over so many bytes.
    pub fn allow(&self, bytes: u64) {
        self.course().allow(self.now(), Duration::from_secs_f64(bytes as f64 / SLOWEST));
    }

    /// It is in this phase from now on.
    pub fn enter(&self, phase: Phase) {
        self.course().enter(self.now(), phase);
    }

    /// Runs `wait`, which waits for the coordinator: meanwhile this thread does not count as standing still.
    pub fn waiting<V>(&self, wait: impl FnOnce() -> V) -> V {
        self.course().wait(self.now());
        let value = wait();
        self.course().go_on(self.now());
        value
    }

    /// For a heartbeat.
    pub fn reading(&self) -> Reading {
        self.course().reading(self.now())
    }

    fn now(&self) -> Duration {
        self.begun.elapsed()
    }

    fn course(&self) -> MutexGuard<'_, Course> {
        self.course.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// As [`Pulse`], without a clock.
#[derive(Debug, Default)]
struct Course {
    phase: Option<Phase>,
    entered: Duration,
    last: Duration,
    allowed: Duration,
    waits: bool,
    /// In this visit of the phase.
    most: Duration,
    longest: Longest,
}

impl Course {
    fn still(&self, now: Duration) -> Duration {
        now.saturating_sub(self.last + self.allowed)
    }

    fn beat(&mut self, now: Duration) {
        self.most = self.most.max(self.still(now));
        (self.last, self.allowed) = (now, Duration::ZERO);
    }

    fn allow(&mut self, now: Duration, time: Duration) {
        self.beat(now);
        self.allowed = time;
    }

    fn enter(&mut self, now: Duration, phase: Phase) {
        self.beat(now);
        if self.phase == Some(phase) {
            return;
        }
        if let Some(left) = self.phase.replace(phase) {
            let longest = &mut self.longest[place(left)];
            *longest = Some(longest.unwrap_or_default().max(self.most));
        }
        (self.entered, self.most) = (now, Duration::ZERO);
    }

    fn wait(&mut self, now: Duration) {
        self.beat(now);
        self.waits = true;
    }

    fn go_on(&mut self, now: Duration) {
        // How long the coordinator took says nothing about the phase.
        (self.last, self.waits) = (now, false);
    }

    fn reading(&self, now: Duration) -> Reading {
        let (still, in_phase) = (self.still(now), now.saturating_sub(self.entered));
        Reading { still, waits: self.waits, in_phase, longest: self.longest }
    }
}

/// A phase's place in [`Phase::ALL`].
fn place(phase: Phase) -> usize {
    phase as usize - 1
}

#[cfg(test)]
mod tests {
    use super::*;

    fn s(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn every_phase_has_its_place() {
        assert!(Phase::ALL.iter().enumerate().all(|(i, phase)| place(*phase) == i));
    }

    #[test]
    fn a_phase_that_is_left_tells_how_long_it_was_still_at_most() {
        let mut course = Course::default();
        course.enter(s(1), Phase::Checkpoint);
        course.beat(s(3));
        course.enter(s(4), Phase::Checkpoint);
        let (waits, longest) = (false, Longest::default());
        assert_eq!(course.reading(s(9)), Reading { still: s(5), waits, in_phase: s(8), longest });
        course.enter(s(9), Phase::Evaluation);
        let mut longest = Longest::default();
        longest[place(Phase::Checkpoint)] = Some(s(5));
        assert_eq!(course.reading(s(9)), Reading { still: s(0), waits, in_phase: s(0), longest });
        // A faster visit changes nothing.
        course.enter(s(10), Phase::Checkpoint);
        course.enter(s(11), Phase::Forward);
        assert_eq!(course.reading(s(11)).longest[place(Phase::Checkpoint)], Some(s(5)));
    }

    #[test]
    fn what_cannot_beat_is_given_time_by_its_size() {
        let mut course = Course::default();
        course.enter(s(0), Phase::Checkpoint);
        course.allow(s(0), s(100));
        assert_eq!(course.reading(s(99)).still, s(0));
        assert_eq!(course.reading(s(105)).still, s(5));
        course.beat(s(106));
        assert_eq!(course.reading(s(108)).still, s(2), "what was allowed is used up");
    }

    #[test]
    fn waiting_for_the_coordinator_is_not_standing_still() {
        let mut course = Course::default();
        course.enter(s(0), Phase::Optimizer);
        course.wait(s(1));
        let reading = course.reading(s(60));
        assert_eq!((reading.waits, reading.still), (true, s(59)));
        course.go_on(s(60));
        let reading = course.reading(s(62));
        assert_eq!((reading.waits, reading.still), (false, s(2)));
        course.enter(s(62), Phase::Data);
        assert_eq!(course.reading(s(62)).longest[place(Phase::Optimizer)], Some(s(2)));
    }

    #[test]
    fn a_thread_without_a_pulse_beats_nothing() {
        beat();
        let pulse = Arc::new(Pulse::default());
        std::thread::scope(|scope| {
            scope.spawn(|| {
                pulse.clone().install();
                pulse.enter(Phase::Loading);
                allow(100_000_000_000);
            });
        });
        beat();
        assert!(pulse.course().allowed > s(1000));
    }
}
