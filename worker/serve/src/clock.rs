//! The one place of the server that reads a clock.

use std::time::{Duration, Instant};

/// Time since it was made.
#[derive(Clone, Copy, Debug)]
pub struct Stopwatch(Instant);

impl Stopwatch {
    /// Starts at zero.
    pub fn start() -> Self {
        Self(Instant::now())
    }

    /// What it shows.
    pub fn elapsed(self) -> Duration {
        self.0.elapsed()
    }

    /// Milliseconds that it shows.
    pub fn milliseconds(self) -> f64 {
        self.elapsed().as_secs_f64() * 1e3
    }
}
