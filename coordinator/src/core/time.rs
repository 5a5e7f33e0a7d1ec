//! Time as the core knows it: a number that the driver hands in, counted from the driver's start.

use std::time::Duration;

/// A moment, counted from the driver's start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Timestamp(Duration);

impl Timestamp {
    /// The moment `elapsed` after the driver's start.
    pub fn at(elapsed: Duration) -> Self {
        Self(elapsed)
    }

    /// How long after the driver's start.
    pub fn elapsed(self) -> Duration {
        self.0
    }

    /// The moment `wait` later; the end of time if that cannot be counted.
    pub fn after(self, wait: Duration) -> Self {
        Self(self.0.saturating_add(wait))
    }

    /// The moment `time` earlier; the driver's start if that is before it.
    pub fn before(self, time: Duration) -> Self {
        Self(self.0.saturating_sub(time))
    }

    /// From `earlier` to here; nothing if it is later.
    pub fn since(self, earlier: Self) -> Duration {
        self.0.saturating_sub(earlier.0)
    }
}
