//! Where time enters the coordinator: the only file that reads a clock.
//!
//! ```text
//! real time   0 ─────── 1 ─────── 2 ── stands still ── 7 ─────── 8
//! core's      0 ─────── 1 ─────── 2                    2.25 ──── 3.25
//! ```
//!
//! The core's time is the time in which the coordinator could have heard workers. A process that was
//! stopped, a virtual machine that was paused, a disk that took seconds for a record, more calls than could
//! be handled: what was said meanwhile waits unread, so none of that time counts against those who said it.
//! Every bound of the core moves with it at once, for there is one clock.
//!
//! How late a worker is heard is measured by a [`SignOfLife`]: the coordinator says to itself that it lives,
//! on the way of a worker's call. As long as that is overdue the core's time stands.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::time::Instant;

use crate::core::time::Timestamp;

/// The coordinator's own sign of life, handed in like a worker's.
#[derive(Clone, Copy, Debug)]
pub struct SignOfLife {
    /// When it was said.
    woke: Instant,
    /// How long after it was to be said: no thread had a processor.
    late: Duration,
}

/// Says that the coordinator lives.
#[derive(Debug)]
pub struct SignsOfLife {
    due: Instant,
}

impl SignsOfLife {
    /// Turns of the scheduler that a worker's call takes from its connection to the driver.
    const TURNS: usize = 4;

    /// From now on.
    pub fn start() -> Self {
        Self { due: Instant::now() + Clock::PULSE }
    }

    /// Waits for the next one.
    pub async fn next(&mut self) -> SignOfLife {
        tokio::time::sleep_until(self.due).await;
        let woke = Instant::now();
        let pulse = SignOfLife { woke, late: woke.saturating_duration_since(self.due) };
        self.due = woke + Clock::PULSE;
        for _ in 0..Self::TURNS {
            tokio::task::yield_now().await;
        }
        pulse
    }
}

/// A time in which the coordinator could not hear, once it is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stall {
    /// How long it was.
    pub time: Duration,
    /// What most of it was spent with.
    pub cause: StallCause,
}

/// Why a coordinator could not hear.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StallCause {
    /// Nothing of it ran.
    Processor,
    /// A record was on its way to the disk.
    Disk,
    /// More calls than it could handle.
    Calls,
}

impl StallCause {
    /// What happened, and what to do.
    pub fn text(self) -> &'static str {
        match self {
            Self::Processor => {
                "none of its threads got CPU time (the process or its machine was paused, or the machine \
                 is overloaded)"
            }
            Self::Disk => "it waited for the disk that holds its journal",
            Self::Calls => {
                "calls of workers and launchers came faster than it could handle (give it more CPU cores)"
            }
        }
    }
}

/// The driver's clock: monotonic, counted from its start.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    start: Instant,
    /// When the driver came round last.
    round: Instant,
    /// All that was said until then has been heard.
    heard: Instant,
    /// For how long it could not listen, in all.
    deaf: Duration,
    /// Whether it cannot now.
    stands: bool,
    /// The time that it cannot listen, so far, and what of it is known.
    stall: StallParts,
    /// What the driver waited for the disk since it came round.
    disk: Duration,
}

/// What the time of a stall was spent with.
#[derive(Clone, Copy, Debug, Default)]
struct StallParts {
    all: Duration,
    disk: Duration,
    processor: Duration,
}

impl Clock {
    /// The driver comes round this often, whether anything happens or not, and says as often that it lives.
    pub const PULSE: Duration = Duration::from_millis(250);
    /// A pulse that is not later than this is the machine's load.
    const LOAD: Duration = Self::PULSE;

    /// A clock that starts now.
    pub fn start() -> Self {
        let now = Instant::now();
        Self {
            start: now,
            round: now,
            heard: now,
            deaf: Duration::ZERO,
            stands: false,
            stall: StallParts::default(),
            disk: Duration::ZERO,
        }
    }

    /// The driver comes round: now, for the core, and the stall that is over.
    pub fn come_round(&mut self) -> (Timestamp, Option<Stall>) {
        let stall = self.come_round_at(Instant::now());
        (self.now(), stall)
    }

    fn come_round_at(&mut self, now: Instant) -> Option<Stall> {
        let limit = self.heard + Self::PULSE + Self::LOAD;
        let deaf = now.saturating_duration_since(limit.max(self.round));
        self.round = now;
        self.deaf += deaf;
        self.stands = !deaf.is_zero();
        let disk = std::mem::take(&mut self.disk);
        if self.stands {
            self.stall.all += deaf;
            self.stall.disk += disk;
            return None;
        }
        let StallParts { all, disk, processor } = std::mem::take(&mut self.stall);
        let cause = match all / 2 {
            half if processor >= half => StallCause::Processor,
            half if disk >= half => StallCause::Disk,
            _ => StallCause::Calls,
        };
        (!all.is_zero()).then_some(Stall { time: all, cause })
    }

    /// A pulse has come: so has all that was said before it.
    pub fn hear(&mut self, pulse: SignOfLife) {
        self.heard = self.heard.max(pulse.woke);
        self.stall.processor += pulse.late;
    }

    /// The driver waited for the disk from `since` on.
    pub fn waited_for_disk(&mut self, since: Instant) {
        self.disk += since.elapsed();
    }

    /// When the driver came round last, for the core.
    pub fn now(&self) -> Timestamp {
        Timestamp::at(self.round.saturating_duration_since(self.start).saturating_sub(self.deaf))
    }

    /// When the driver must come round again: for a deadline of the core, or to show that it listens.
    pub fn next_round(&self, deadline: Option<Timestamp>) -> Instant {
        let pulse = self.round + Self::PULSE;
        // No deadline comes nearer while the core's time stands; one further away than tokio can count
        // never comes.
        let deadline = deadline
            .filter(|_| !self.stands)
            .and_then(|at| self.start.checked_add(at.elapsed().saturating_add(self.deaf)));
        deadline.map_or(pulse, |deadline| deadline.min(pulse))
    }
}

/// A moment, for what is measured or waited for by whom the core's time does not concern.
pub fn monotonic() -> Instant {
    Instant::now()
}

/// Milliseconds since the Unix epoch, for people.
pub fn unix_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PULSE: Duration = Clock::PULSE;
    const SECONDS: Duration = Duration::from_secs(5);

    /// A clock that has heard four pulses, each in time.
    fn clock() -> (Clock, Instant) {
        let mut clock = Clock::start();
        for pulse in 1..=4 {
            let now = clock.start + PULSE * pulse;
            clock.hear(SignOfLife { woke: now, late: Duration::ZERO });
            assert_eq!(clock.come_round_at(now), None);
        }
        let now = clock.round;
        assert_eq!(clock.now(), Timestamp::at(PULSE * 4));
        (clock, now)
    }

    #[test]
    fn time_in_which_nobody_could_be_heard_does_not_count() {
        let (mut clock, last) = clock();
        let (before, thawed) = (clock.now(), last + SECONDS);
        assert_eq!(clock.come_round_at(thawed), None, "it is not over before it is heard again");
        let now = clock.now();
        assert_eq!(now, before.after(PULSE * 2));
        assert_eq!(clock.next_round(Some(now.after(PULSE / 2))), thawed + PULSE, "no deadline comes nearer");
        clock.hear(SignOfLife { woke: thawed, late: SECONDS - PULSE });
        let later = thawed + PULSE / 2;
        let stall = clock.come_round_at(later);
        assert_eq!(stall, Some(Stall { time: SECONDS - PULSE * 2, cause: StallCause::Processor }));
        assert_eq!(clock.now(), now.after(PULSE / 2));
        let soon = Duration::from_millis(100);
        let deadline = clock.now().after(soon);
        assert_eq!(clock.next_round(Some(deadline)), later + soon, "it is as far away as it was");
        assert_eq!(clock.next_round(None), later + PULSE);
    }

    #[test]
    fn a_stall_is_named_by_its_cause() {
        for (disk, cause) in [(SECONDS, StallCause::Disk), (Duration::ZERO, StallCause::Calls)] {
            let (mut clock, last) = clock();
            // What is waited for is said in time, and heard late: pulses as well.
            clock.disk = disk;
            assert_eq!(clock.come_round_at(last + SECONDS), None);
            clock.hear(SignOfLife { woke: last + SECONDS - PULSE, late: Duration::ZERO });
            let over = clock.come_round_at(last + SECONDS);
            assert_eq!(over, Some(Stall { time: SECONDS - PULSE * 2, cause }));
        }
    }

    #[test]
    fn a_queue_that_is_handled_late_stops_the_clock_though_the_driver_comes_round() {
        let (mut clock, last) = clock();
        let (mut now, before) = (last, clock.now());
        while now < last + SECONDS {
            now += PULSE / 10;
            clock.come_round_at(now);
        }
        assert_eq!(clock.now(), before.after(PULSE * 2));
    }

    #[test]
    fn a_loaded_machine_is_not_a_deaf_one() {
        let (mut clock, last) = clock();
        let before = clock.now();
        assert_eq!(clock.come_round_at(last + PULSE * 2), None);
        assert_eq!(clock.now(), before.after(PULSE * 2));
    }
}
