//! The user's console: lines, and on a terminal a progress bar that stays below them.

use std::io::{IsTerminal, Write};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Takes whole lines from several tasks.
pub trait Console: Send + Sync {
    /// Shows one line.
    fn line(&self, text: &str);
}

/// Standard error, with a bar under the lines if it is a terminal. Results go to standard output, so that they can be piped.
pub struct Terminal {
    bar: Option<ProgressBar>,
}

impl Terminal {
    /// The process's console.
    pub fn new() -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            // Until the first step there is nothing to show; `hidden` would lose lines printed above the bar.
            let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
            bar.set_style(
                ProgressStyle::with_template("{msg}").unwrap_or_else(|_| ProgressStyle::default_bar()),
            );
            bar
        });
        Self { bar }
    }

    /// Whether there is a bar to show progress on.
    pub fn has_bar(&self) -> bool {
        self.bar.is_some()
    }

    /// Redraws the bar.
    pub fn progress(&self, done: u64, total: u64, message: String) {
        if let Some(bar) = &self.bar {
            if bar.length() != Some(total) {
                let template = "{bar:28.cyan/blue} {pos}/{len} {wide_msg}";
                if let Ok(style) = ProgressStyle::with_template(template) {
                    bar.set_style(style);
                }
                bar.set_length(total);
            }
            bar.set_position(done);
            bar.set_message(message);
        }
    }

    /// Takes the bar away.
    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

impl Console for Terminal {
    fn line(&self, text: &str) {
        let write = || {
            // A closed terminal must not end the run.
            let _ = writeln!(std::io::stderr().lock(), "{text}");
        };
        match &self.bar {
            Some(bar) => bar.suspend(write),
            None => write(),
        }
    }
}

/// Keeps lines for tests.
#[cfg(test)]
#[derive(Default)]
pub struct Recorder(std::sync::Mutex<Vec<String>>);

#[cfg(test)]
impl Recorder {
    /// What was shown so far.
    pub fn lines(&self) -> Vec<String> {
        self.0.lock().unwrap().clone()
    }
}

#[cfg(test)]
impl Console for Recorder {
    fn line(&self, text: &str) {
        self.0.lock().unwrap().push(text.to_owned());
    }
}
