//! The user's console: lines, folded to a terminal's width, and a progress bar that stays below them. No
//! other thread waits for it ([`super::writer`]).

use std::{
    borrow::Cow,
    io::{IsTerminal, Write},
};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::writer::{ConsoleWriter, Piece, Screen};

/// Where a coordinator's line says something, after its time and topic: folded lines go on there.
const MESSAGE_COLUMN: usize = 18;
/// Where other folded lines go on.
const INDENT: usize = 2;

/// Takes whole lines from several tasks.
pub trait Console: Send + Sync {
    /// Shows one line.
    fn line(&self, text: &str);
}

/// Standard error, with a bar under the lines if it is a terminal. Results go to standard output, so that
/// they can be piped.
pub struct Terminal {
    has_bar: bool,
    writer: ConsoleWriter,
}

impl Terminal {
    /// The process's console.
    pub fn new() -> Self {
        let has_bar = std::io::stderr().is_terminal();
        Self { has_bar, writer: ConsoleWriter::new(Stderr::new(has_bar)) }
    }

    /// Whether there is a bar to show progress on.
    pub fn has_bar(&self) -> bool {
        self.has_bar
    }

    /// Redraws the bar.
    pub fn progress(&self, done: u64, total: u64, message: String) {
        if self.has_bar {
            self.writer.put(Piece::Progress { done, total, message });
        }
    }

    /// Takes the bar away; waits a moment for what is to be shown.
    pub fn finish(&self) {
        self.writer.put(Piece::Finish);
        self.writer.flush();
    }
}

impl Console for Terminal {
    fn line(&self, text: &str) {
        self.writer.put(Piece::Line(text.to_owned()));
    }
}

/// The far end of a terminal: the only thread that waits for it.
struct Stderr {
    bar: Option<ProgressBar>,
}

impl Stderr {
    fn new(has_bar: bool) -> Self {
        let bar = has_bar.then(|| {
            // Until the first step there is nothing to show; `hidden` would lose lines printed above the bar.
            let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
            bar.set_style(
                ProgressStyle::with_template("{msg}").unwrap_or_else(|_| ProgressStyle::default_bar()),
            );
            bar
        });
        Self { bar }
    }

    fn progress(&self, done: u64, total: u64, message: String) {
        let Some(bar) = &self.bar else { return };
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

    fn write(&self, text: &str) {
        // A closed terminal must not end the run.
        let write = || drop(std::io::stderr().lock().write_all(text.as_bytes()));
        match &self.bar {
            Some(bar) => bar.suspend(write),
            None => write(),
        }
    }
}

impl Screen for Stderr {
    fn show(&mut self, piece: Piece) {
        match piece {
            Piece::Line(text) if self.bar.is_some() => {
                let width = width();
                self.write(&(folded(&shortened(&text, width), width) + "\n"));
            }
            Piece::Line(text) => self.write(&(text + "\n")),
            Piece::Text(text) => self.write(&text),
            Piece::Progress { done, total, message } => self.progress(done, total, message),
            Piece::Finish => self.bar.iter().for_each(ProgressBar::finish_and_clear),
        }
    }
}

/// Standard error for a process's own log, which must not stop for a reader.
#[derive(Clone)]
pub struct LogWriter(std::sync::Arc<ConsoleWriter>);

impl LogWriter {
    /// With a thread of its own.
    pub fn new() -> Self {
        Self(std::sync::Arc::new(ConsoleWriter::new(Stderr::new(false))))
    }

    /// Waits a moment for what is to be shown.
    pub fn flush(&self) {
        self.0.flush();
    }
}

impl Write for LogWriter {
    /// One event at a time, as the log writes them.
    fn write(&mut self, event: &[u8]) -> std::io::Result<usize> {
        self.0.put(Piece::Text(String::from_utf8_lossy(event).into_owned()));
        Ok(event.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Columns of the terminal; without end where that is unknown.
fn width() -> usize {
    terminal_size::terminal_size_of(std::io::stderr()).map_or(usize::MAX, |(columns, _)| columns.0.into())
}

/// `text` without a step's parts, ` (ms: data 2, ...)`, if it is wider than `width`: on a narrow terminal
/// they would take half of the screen, and the coordinator's log has them.
fn shortened(text: &str, width: usize) -> Cow<'_, str> {
    let parts = || {
        let begin = text.find(" (ms")?;
        Some(begin..begin + text[begin..].find(')')? + 1)
    };
    match parts() {
        Some(parts) if text.chars().count() > width => {
            [&text[..parts.start], &text[parts.end..]].concat().into()
        }
        _ => text.into(),
    }
}

/// `text` in lines of at most `width` columns, broken between columns of a table rather than between words.
fn folded(text: &str, width: usize) -> String {
    let clock = text.as_bytes().get(2) == Some(&b':') && text.as_bytes().get(5) == Some(&b':');
    let indent = if clock { MESSAGE_COLUMN } else { INDENT };
    if width < 2 * indent {
        return text.to_owned();
    }
    let (mut lines, mut rest, mut room) = (String::new(), text, width);
    while let Some((over, _)) = rest.char_indices().nth(room) {
        // The blank that follows the last word with room belongs to the line, too.
        let fits = &rest[..over + usize::from(rest.as_bytes()[over] == b' ')];
        let words = || fits.char_indices().filter(|(at, c)| *c == ' ' && !fits[..*at].trim().is_empty());
        let mut columns = words().filter(|(at, _)| rest[*at..].starts_with("  "));
        let at = columns
            .next_back()
            .filter(|(at, _)| 2 * at > over)
            .or_else(|| words().next_back())
            .map_or(over, |(at, _)| at);
        lines += rest[..at].trim_end();
        lines.push('\n');
        lines.extend(std::iter::repeat_n(' ', indent));
        rest = rest[at..].trim_start();
        room = width - indent;
    }
    lines + rest
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

#[cfg(test)]
mod tests {
    use super::*;

    const STEP: &str =
        "17:15:17  step    10/12  epoch 0  loss 1.8115    grad 4.5836    115 ms (ms: data 1.8, vision 7.9)";

    #[test]
    fn a_line_that_fits_is_left_alone() {
        assert_eq!(folded(STEP, STEP.len()), STEP);
        assert_eq!(folded(STEP, usize::MAX), STEP);
        assert_eq!(folded("", 40), "");
    }

    #[test]
    fn a_long_line_goes_on_below_its_message() {
        assert_eq!(
            folded(STEP, 80),
            "17:15:17  step    10/12  epoch 0  loss 1.8115    grad 4.5836\n\
             \x20                 115 ms (ms: data 1.8, vision 7.9)"
        );
        assert_eq!(folded("one two three", 8), "one two\n  three");
        assert_eq!(folded("one two three", 7), "one two\n  three");
    }

    #[test]
    fn a_narrow_terminal_is_not_told_the_parts_of_a_step() {
        assert_eq!(shortened(STEP, STEP.len()), STEP);
        assert_eq!(
            shortened(STEP, STEP.len() - 1),
            "17:15:17  step    10/12  epoch 0  loss 1.8115    grad 4.5836    115 ms"
        );
        assert_eq!(shortened("a word (ms without an end", 5), "a word (ms without an end");
    }

    #[test]
    fn every_width_keeps_every_word_and_its_bounds() {
        let words = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        for width in 2 * MESSAGE_COLUMN..120 {
            let lines = folded(STEP, width);
            assert!(lines.lines().all(|line| line.chars().count() <= width), "{width}: {lines}");
            assert_eq!(words(&lines), words(STEP));
        }
    }

    #[test]
    fn what_has_no_blank_is_cut_at_the_edge() {
        assert_eq!(folded("abcdefghij", 5), "abcde\n  fgh\n  ij");
        assert_eq!(folded("äöüäöüäöü", 5).lines().next(), Some("äöüäö"));
    }
}
