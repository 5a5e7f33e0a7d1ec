//! Carries what a child writes to the console.
//!
//! The console gets whole lines with a prefix, so that ranks do not cut into each other's; a line longer than
//! `MAX_LINE` is cut into several.

use std::sync::Arc;

use tokio::io::{AsyncRead, AsyncReadExt};

use super::console::Console;

/// Longest piece of a line shown at once; a program that never ends its line must not fill our memory.
const MAX_LINE: usize = 64 << 10;

/// Where the lines of one stream are shown.
#[derive(Clone)]
pub struct ConsolePrefix {
    /// The console.
    pub console: Arc<dyn Console>,
    /// Stands in front of each line.
    pub prefix: String,
}

/// Shows a pipe to its end.
pub async fn pump(mut from: impl AsyncRead + Unpin, shown: ConsolePrefix) {
    let (mut lines, mut buffer) = (Lines::new(shown), vec![0; 8 << 10]);
    while let Ok(length @ 1..) = from.read(&mut buffer).await {
        lines.add_bytes(&buffer[..length]);
    }
    lines.finish();
}

/// Bytes become lines.
pub struct Lines {
    shown: ConsolePrefix,
    line: Vec<u8>,
}

impl Lines {
    /// Nothing was read yet.
    pub fn new(shown: ConsolePrefix) -> Self {
        Self { shown, line: Vec::new() }
    }

    /// Shows the lines that are whole now.
    pub fn add_bytes(&mut self, bytes: &[u8]) {
        for piece in bytes.split_inclusive(|byte| *byte == b'\n') {
            self.line.extend_from_slice(piece);
            if piece.ends_with(b"\n") || self.line.len() >= MAX_LINE {
                self.emit();
            }
        }
    }

    /// Shows a last line without an end.
    pub fn finish(mut self) {
        if !self.line.is_empty() {
            self.emit();
        }
    }

    fn emit(&mut self) {
        let text = String::from_utf8_lossy(&self.line);
        self.shown.console.line(&format!("{}{}", self.shown.prefix, text.trim_end_matches(['\n', '\r'])));
        self.line.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::supervise::console::Recorder;

    fn shown(input: &[u8]) -> Vec<String> {
        let recorder = Arc::new(Recorder::default());
        let shown = ConsolePrefix { console: recorder.clone(), prefix: "[rank0] ".into() };
        tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(pump(input, shown));
        recorder.lines()
    }

    #[test]
    fn the_console_gets_whole_lines_with_a_prefix() {
        let lines = shown(b"one\ntwo \xff\r\nno end");
        assert_eq!(lines, ["[rank0] one", "[rank0] two \u{fffd}", "[rank0] no end"]);
    }

    #[test]
    fn an_endless_line_is_cut() {
        assert_eq!(shown(&vec![b'x'; MAX_LINE + 10_000]).len(), 2);
    }
}
