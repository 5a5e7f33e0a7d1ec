//! Whether anything moves in a generation, as heartbeats show it: how a rank that stands still is told from one that is slow while no
//! step's time is known.
//!
//! ```text
//! began ────── busy ──────▶ moved ────────── quiet ──────────▶
//! overdue = moved + 3 x busy + patience
//! ```
//!
//! The ranks that wait show how long their own work took (`busy`); whoever takes more than three times as long again, and the
//! patience on top, is not slow. It says nothing while nobody waits: then all are at work.

use std::time::Duration;

use super::time::Timestamp;

/// When a generation's members were seen to move.
#[derive(Clone, Copy, Debug, Default)]
pub struct Motion {
    /// Since when what is done now has been done: the generation was formed, has started, or a step was committed.
    began: Timestamp,
    /// When a member was last seen in another phase, or in another collective.
    moved: Timestamp,
    /// When it was last looked at in vain.
    looked: Timestamp,
}

impl Motion {
    /// Something else begins.
    pub fn begin(&mut self, now: Timestamp) {
        *self = Self { began: now, moved: now, looked: now };
    }

    /// A member has moved.
    pub fn moved(&mut self, now: Timestamp) {
        self.moved = self.moved.max(now);
    }

    /// It was looked at; again after as long.
    pub fn looked(&mut self, now: Timestamp) {
        self.looked = now;
    }

    /// When whoever is waited for is overdue.
    pub fn overdue_at(&self, patience: Duration) -> Timestamp {
        let busy = self.moved.since(self.began);
        self.moved.max(self.looked).after(busy * 3 + patience)
    }

    /// How long nothing has moved.
    pub fn quiet(&self, now: Timestamp) -> Duration {
        now.since(self.moved)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Timestamp {
        Timestamp::at(Duration::from_secs(seconds))
    }

    #[test]
    fn whoever_takes_far_longer_than_the_others_took_is_overdue() {
        let mut motion = Motion::default();
        motion.begin(at(100));
        assert_eq!(motion.overdue_at(Duration::from_secs(10)), at(110));
        motion.moved(at(105));
        assert_eq!(
            motion.overdue_at(Duration::from_secs(10)),
            at(130),
            "five seconds' work, three times again, and ten"
        );
        assert_eq!(motion.quiet(at(108)), Duration::from_secs(3));
        motion.looked(at(130));
        assert_eq!(motion.overdue_at(Duration::from_secs(10)), at(155));
    }
}
