//! Where time enters the coordinator: the only file that reads a clock.
//!
//! ```text
//! real time   0 ─────── 1 ─────── 2 ── stands still ── 7 ─────── 8
//! core's      0 ─────── 1 ─────── 2                    2.25 ──── 3.25
//! ```
//!
//! The core's time is the time in which the coordinator could have heard workers. A process that was
//! stopped, a virtual machine that was paused, a disk that took seconds for a record: whatever was said
//! meanwhile waits unread, so none of it counts against those who said it. Every bound of the core moves with
//! it at once, for there is one clock.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::time::Instant;

use crate::core::time::Timestamp;

/// The driver's clock: monotonic, counted from its start.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    start: Instant,
    /// When the driver came round last.
    round: Instant,
    /// For how long it could not listen, in all.
    deaf: Duration,
}

impl Clock {
    /// The driver comes round this often, whether anything happens or not: what is beyond it was spent
    /// elsewhere.
    pub const PULSE: Duration = Duration::from_millis(250);

    /// A clock that starts now.
    pub fn start() -> Self {
        let now = Instant::now();
        Self { start: now, round: now, deaf: Duration::ZERO }
    }

    /// The driver comes round: now, for the core, and for how long it did not listen. Less than a pulse is
    /// the machine's load.
    pub fn come_round(&mut self) -> (Timestamp, Duration) {
        self.come_round_at(Instant::now())
    }

    fn come_round_at(&mut self, now: Instant) -> (Timestamp, Duration) {
        let late = now.saturating_duration_since(self.round).saturating_sub(Self::PULSE);
        let deaf = if late > Self::PULSE { late } else { Duration::ZERO };
        self.round = now;
        self.deaf += deaf;
        (self.now(), deaf)
    }

    /// When the driver came round last, for the core.
    pub fn now(&self) -> Timestamp {
        Timestamp::at(self.round.saturating_duration_since(self.start).saturating_sub(self.deaf))
    }

    /// When the driver must come round again: for a deadline of the core, or to show that it listens.
    pub fn next_round(&self, deadline: Option<Timestamp>) -> Instant {
        let pulse = self.round + Self::PULSE;
        // A deadline further away than tokio can count never comes.
        let deadline = deadline.and_then(|at| self.start.checked_add(at.elapsed().saturating_add(self.deaf)));
        deadline.map_or(pulse, |deadline| deadline.min(pulse))
    }
}

/// Milliseconds since the Unix epoch, for people.
pub fn unix_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_in_which_nobody_could_be_heard_does_not_count() {
        let mut clock = Clock::start();
        let began = clock.start;
        for pulse in 1..=4 {
            assert_eq!(clock.come_round_at(began + Clock::PULSE * pulse).1, Duration::ZERO);
        }
        let before = clock.now();
        assert_eq!(before, Timestamp::at(Clock::PULSE * 4));
        let thawed = began + Clock::PULSE * 4 + Duration::from_secs(5);
        let (now, deaf) = clock.come_round_at(thawed);
        assert_eq!(deaf, Duration::from_secs(5) - Clock::PULSE);
        assert_eq!(now, before.after(Clock::PULSE));
        let soon = Duration::from_millis(100);
        assert_eq!(
            clock.next_round(Some(now.after(soon))),
            thawed + soon,
            "a deadline is as far away as it was"
        );
        assert_eq!(clock.next_round(None), thawed + Clock::PULSE);
    }

    #[test]
    fn a_loaded_machine_is_not_a_deaf_one() {
        let mut clock = Clock::start();
        let late = clock.start + Clock::PULSE * 2;
        assert_eq!(clock.come_round_at(late), (Timestamp::at(Clock::PULSE * 2), Duration::ZERO));
    }
}
