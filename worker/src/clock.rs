//! Where time enters a worker: the only file of the engine that reads a clock.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Now, for durations and deadlines.
pub fn now() -> Instant {
    Instant::now()
}

/// Since the Unix epoch, for people and between processes; nothing where the machine's clock stands before
/// it.
pub fn since_epoch() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}
