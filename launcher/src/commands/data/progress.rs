//! A line that counts episodes or samples on a terminal; nothing anywhere else.

use std::{
    io::{IsTerminal, Write, stderr},
    sync::atomic::{AtomicU64, Ordering},
};

/// Shows how far a reader is.
pub struct Progress {
    what: &'static str,
    terminal: bool,
    /// Hundredths that are shown.
    shown: AtomicU64,
}

impl Progress {
    /// A line about so many of `what` that appears with the first hundredth.
    pub fn new(what: &'static str) -> Self {
        Self { what, terminal: stderr().is_terminal(), shown: AtomicU64::new(0) }
    }

    /// So many are done, of so many.
    pub fn show(&self, done: u64, all: u64) {
        let hundredths = done.saturating_mul(100).checked_div(all).unwrap_or(0);
        if self.terminal && self.shown.fetch_max(hundredths, Ordering::Relaxed) < hundredths {
            // A line that cannot be shown is not missed.
            let _ = write!(stderr().lock(), "\r\x1b[2K{done} of {all} {}, {hundredths} %", self.what);
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if *self.shown.get_mut() > 0 {
            let _ = write!(stderr().lock(), "\r\x1b[2K");
        }
    }
}
