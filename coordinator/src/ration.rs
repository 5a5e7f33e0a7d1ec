//! How much of a processor's time something may take: a part of the time that passes, and a credit to begin
//! with.
//!
//! ```text
//! used    ▁▂▄▆█ credit: nothing more may begin
//!                ▇▆▅▄▃▂▁  one part in READ_SHARE of the time that passes is given back
//! ```

use std::time::Duration;

use coxswain_proto::limits::{READ_CREDIT, READ_SHARE};
use tokio::time::Instant;

/// What was used of a share in a processor's time.
#[derive(Clone, Copy, Debug)]
pub struct Ration {
    used: Duration,
    as_of: Instant,
}

impl Ration {
    /// One of which nothing is used.
    pub fn full(now: Instant) -> Self {
        Self { used: Duration::ZERO, as_of: now }
    }

    /// How long to wait until something more may begin; nothing if it may now.
    pub fn wait(&mut self, now: Instant) -> Duration {
        self.give_back(now);
        self.used.saturating_sub(READ_CREDIT).saturating_mul(READ_SHARE)
    }

    /// So much was used.
    pub fn spend(&mut self, now: Instant, time: Duration) {
        self.give_back(now);
        self.used = self.used.saturating_add(time);
    }

    /// Whether nothing is used.
    pub fn is_full(&mut self, now: Instant) -> bool {
        self.give_back(now);
        self.used.is_zero()
    }

    fn give_back(&mut self, now: Instant) {
        let passed = now.saturating_duration_since(self.as_of);
        self.used = self.used.saturating_sub(passed / READ_SHARE);
        self.as_of = now;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_credit_is_used_at_once_and_given_back_over_time() {
        let begin = Instant::now();
        let mut ration = Ration::full(begin);
        ration.spend(begin, READ_CREDIT);
        assert_eq!(ration.wait(begin), Duration::ZERO, "the last one may begin");
        let over = Duration::from_millis(100);
        ration.spend(begin, over);
        assert_eq!(ration.wait(begin), over * READ_SHARE);
        assert_eq!(ration.wait(begin + over * READ_SHARE), Duration::ZERO);
        assert!(!ration.is_full(begin + over * READ_SHARE));
        assert!(ration.is_full(begin + (READ_CREDIT + over) * READ_SHARE));
    }
}
