//! The user's console: lines, folded to a terminal's width, and a block below them that says where the run is
//! ([`LiveRun`]). No other thread waits for it ([`super::writer`]).

use std::{
    io::{IsTerminal, Write},
    sync::Arc,
    time::{Duration, Instant},
};

use coxswain_proto::v1::WatchEvent;

use super::{
    block::{Block, Size},
    console_mode::{Mode, Visibility},
    writer::{ConsoleWriter, Piece, Screen},
};
use crate::{
    clock,
    launch::inputs::process_env,
    render::{living::LiveRun, log_line::LogLine},
};

/// Where a coordinator's line says something, after its time and topic: folded lines go on there.
const MESSAGE_COLUMN: usize = 18;
/// Where other folded lines go on.
const INDENT: usize = 2;
/// The least time between two drawings of the block: as often as an eye can follow.
const REDRAW: Duration = Duration::from_millis(100);
/// How often the block is drawn though nothing has happened: its clock shows that the launcher lives.
const PULSE: Duration = Duration::from_secs(1);

/// Takes whole lines from several tasks.
pub trait Console: Send + Sync {
    /// Shows one line.
    fn line(&self, text: &str);
}

/// Standard error, with a block under the lines if the mode has one. Results go to standard output, so that
/// they can be piped.
pub struct Terminal {
    mode: Mode,
    writer: LogWriter,
}

impl Terminal {
    /// Shows a run from here on through `writer`, which others may write to as well.
    pub fn new(mode: Mode, writer: LogWriter) -> Self {
        writer.0.put(Piece::Mode(mode));
        Self { mode, writer }
    }

    /// Whether a block follows the run, and nothing else tells of it but what matters.
    pub fn is_living(&self) -> bool {
        self.mode.living && self.mode.every.is_none()
    }

    /// Draws what has happened.
    pub fn watched(&self, event: &WatchEvent) {
        if self.mode.living {
            self.writer.0.put(Piece::Watched(Box::new(event.clone())));
        }
    }

    /// Takes the block away; waits a moment for what is to be shown.
    pub fn finish(&self) {
        self.writer.0.put(Piece::Finish);
        self.writer.flush();
    }
}

impl Console for Terminal {
    fn line(&self, text: &str) {
        self.writer.0.put(Piece::Line(text.to_owned()));
    }
}

/// The far end of a terminal: the only thread that waits for it.
struct Stderr {
    mode: Mode,
    colours: bool,
    begin: Instant,
    living: LiveRun,
    block: Block,
    /// When the block was drawn last.
    drawn: Option<Instant>,
}

impl Stderr {
    fn new() -> Self {
        let colours = process_env("NO_COLOR").is_none();
        let (living, block) = (LiveRun::default(), Block::default());
        Self { mode: Mode::default(), colours, begin: clock::now(), living, block, drawn: None }
    }

    /// Writes text above the block, which is drawn again below it, all at once.
    fn write(&mut self, text: &str) {
        let size = size();
        let erased = size.map_or_else(String::new, |size| self.block.erase(size));
        let below = size.filter(|_| self.mode.living).map_or_else(String::new, |size| {
            let now = clock::now();
            self.drawn = Some(now);
            // The cursor has the last row.
            let lines = self.living.lines(size.columns, size.rows.saturating_sub(1).max(1), now - self.begin);
            self.block.draw(&lines, self.colours)
        });
        // A closed terminal must not end the run.
        let _ = std::io::stderr().lock().write_all([&erased, text, &below].concat().as_bytes());
    }

    fn line(&mut self, text: &str) {
        match self.mode.place(text) {
            Visibility::Screen => {
                let width = size().map_or(usize::MAX, |size| size.columns);
                self.write(&(folded(&narrowed(text, width), width) + "\n"));
            }
            Visibility::Block => {
                if let Some(line) = LogLine::parse(text) {
                    self.living.note(format!("{}  {}", line.time, line.text));
                }
            }
            Visibility::Nowhere => {}
        }
    }

    fn redraw_after(&mut self, pause: Duration) {
        if self.mode.living && self.drawn.is_none_or(|at| at.elapsed() >= pause) {
            self.write("");
        }
    }
}

impl Screen for Stderr {
    fn show(&mut self, piece: Piece) {
        match piece {
            Piece::Line(text) => self.line(&text),
            Piece::Text(text) => self.write(&text),
            Piece::Mode(mode) => self.mode = mode,
            Piece::Watched(event) => {
                self.living.hear(&event);
                self.redraw_after(REDRAW);
            }
            Piece::Finish => {
                self.mode.living = false;
                self.write("");
            }
        }
    }

    fn period(&self) -> Duration {
        if self.mode.living { REDRAW } else { Duration::MAX }
    }

    fn tick(&mut self) {
        self.redraw_after(PULSE);
    }
}

/// Standard error for a process's own log and what it shows, which must not stop for a reader.
#[derive(Clone)]
pub struct LogWriter(Arc<ConsoleWriter>);

impl LogWriter {
    /// With a thread of its own.
    pub fn new() -> Self {
        Self(Arc::new(ConsoleWriter::new(Stderr::new())))
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

/// How large the terminal is, if it is one.
fn size() -> Option<Size> {
    let (columns, rows) =
        terminal_size::terminal_size_of(std::io::stderr()).filter(|_| std::io::stderr().is_terminal())?;
    Some(Size { columns: columns.0.into(), rows: rows.0.into() })
}

/// The line of a step without the columns for which `width` has no room, those first that are missed least:
/// the log has them. Other lines are folded instead.
fn narrowed(text: &str, width: usize) -> String {
    const LEAST_MISSED: [&str; 6] = ["tokens/s", "epoch ", "lr ", " on rank ", "grad ", " ms"];
    let line = LogLine::parse(text).filter(|line| line.step().is_some() && !line.warns());
    let Some(line) = line.filter(|_| text.chars().count() > width) else { return text.to_owned() };
    let parts = line.text.split("  ").map(str::trim).filter(|column| !column.is_empty());
    // What a step's time was spent on stands behind it.
    let mut columns: Vec<_> = parts.map(|column| column.split(" (ms").next().unwrap_or_default()).collect();
    let joined = |columns: &[&str]| format!("{}  {:<7} {}", line.time, line.tag, columns.join("  "));
    for missed in LEAST_MISSED {
        if joined(&columns).chars().count() > width {
            columns.retain(|column| !column.contains(missed));
        }
    }
    joined(&columns)
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
    fn a_steps_line_fits_a_narrow_terminal() {
        let step = "17:15:17  step    10/12  epoch 0  loss 1.8115    grad 4.5836    lr 1.00e-4   16.7 samples/s   4267 tokens/s  \
                    480 ms (ms: vision 120, language 4.2)   512.0 MiB on rank 1";
        assert_eq!(narrowed(step, step.len()), step);
        assert_eq!(
            narrowed(step, 120),
            "17:15:17  step    10/12  epoch 0  loss 1.8115  grad 4.5836  lr 1.00e-4  16.7 samples/s  480 ms  512.0 MiB on rank 1"
        );
        assert_eq!(
            narrowed(step, 100),
            "17:15:17  step    10/12  loss 1.8115  grad 4.5836  16.7 samples/s  480 ms  512.0 MiB on rank 1"
        );
        assert_eq!(
            narrowed(step, 80),
            "17:15:17  step    10/12  loss 1.8115  grad 4.5836  16.7 samples/s  480 ms"
        );
        assert_eq!(narrowed("a word (ms without an end", 5), "a word (ms without an end");
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
