//! Where time enters this crate: the only file of it that reads a clock.

use std::time::{Instant, SystemTime};

/// Now, for deadlines.
pub fn now() -> Instant {
    Instant::now()
}

/// What the files of this machine are dated by.
pub fn date() -> SystemTime {
    SystemTime::now()
}
