//! Where time enters the store: the only file of it that reads a clock.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Now, for deadlines.
pub fn now() -> Instant {
    Instant::now()
}

/// Now, as files are stamped.
pub fn file_time() -> SystemTime {
    SystemTime::now()
}

/// Since the Unix epoch; nothing where the machine's clock stands before it.
pub fn since_epoch() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}
