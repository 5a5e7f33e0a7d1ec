//! Where time enters the coordinator: the only file that reads a clock.

use std::time::{SystemTime, UNIX_EPOCH};

use tokio::time::Instant;

use crate::core::time::Timestamp;

/// The driver's clock: monotonic, counted from its start. Follows tokio's, so that tests may hold it.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    start: Instant,
}

impl Clock {
    /// A clock that starts now.
    pub fn start() -> Self {
        Self { start: Instant::now() }
    }

    /// Now, for the core.
    pub fn now(&self) -> Timestamp {
        Timestamp::at(self.start.elapsed())
    }

    /// A moment of the core, for tokio.
    pub fn instant(&self, at: Timestamp) -> Instant {
        // A deadline further away than tokio can count never comes.
        self.start
            .checked_add(at.elapsed())
            .unwrap_or_else(|| self.start + std::time::Duration::from_secs(1 << 31))
    }
}

/// Milliseconds since the Unix epoch, for people.
pub fn unix_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}
