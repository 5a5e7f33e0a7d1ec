//! A bar of episodes on a terminal; nothing anywhere else.

use indicatif::{ProgressBar, ProgressStyle};

/// Shows how far a reader of episodes is.
pub struct Episodes(ProgressBar);

impl Episodes {
    /// A bar that appears with the first episode.
    pub fn new() -> Self {
        // It hides itself where standard error is no terminal.
        let style = ProgressStyle::with_template("{bar:40} {pos}/{len} episodes, {eta} left");
        Self(ProgressBar::new(0).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar())))
    }

    /// So many are done, of so many.
    pub fn show(&self, done: u64, all: u64) {
        self.0.set_length(all);
        self.0.set_position(done);
    }
}

impl Drop for Episodes {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
