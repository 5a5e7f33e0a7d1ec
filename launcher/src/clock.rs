//! Where time enters the launcher: the only file of it that reads a clock.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Now, for durations and deadlines.
pub fn now() -> Instant {
    Instant::now()
}

/// The machine's time, beside that of files.
pub fn system() -> SystemTime {
    SystemTime::now()
}

/// Since the Unix epoch; nothing where the machine's clock stands before it.
pub fn since_epoch() -> Duration {
    system().duration_since(UNIX_EPOCH).unwrap_or_default()
}
