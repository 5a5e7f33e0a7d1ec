//! Lines at the bottom of a terminal that are drawn again in place.
//!
//! The cursor rests at the beginning of the line below them, so a process that is killed leaves a screen on
//! which a shell can go on. Nothing is hidden, nothing is asked of the terminal.

use std::fmt::Write;

use crate::render::living::{BlockLine, Tone};

/// Columns and rows of a terminal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size {
    /// Characters in a row.
    pub columns: usize,
    /// Rows.
    pub rows: usize,
}

/// What of the block stands on the terminal.
#[derive(Debug, Default)]
pub struct Block {
    /// Characters of each of its lines.
    drawn: Vec<usize>,
}

impl Block {
    /// What takes the block away. A terminal that has become narrower since has broken its lines.
    pub fn erase(&mut self, size: Size) -> String {
        let rows_of = |width: usize| width.div_ceil(size.columns.max(1)).max(1);
        let rows: usize = self.drawn.drain(..).map(rows_of).sum();
        match rows.min(size.rows.saturating_sub(1)) {
            0 => String::new(),
            rows => format!("\x1b[{rows}F\x1b[J"),
        }
    }

    /// What draws these lines; the block is not there.
    pub fn draw(&mut self, lines: &[BlockLine], colours: bool) -> String {
        self.drawn = lines.iter().map(|line| line.text.chars().count()).collect();
        let mut text = String::new();
        for line in lines {
            let colour = match line.tone {
                Tone::Bar => "\x1b[36m",
                Tone::Figure => "",
                Tone::Event => "\x1b[2m",
            };
            // Strings take everything.
            let _ = match colours && !colour.is_empty() {
                true => writeln!(text, "{colour}{}\x1b[0m", line.text),
                false => writeln!(text, "{}", line.text),
            };
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(texts: &[&str]) -> Vec<BlockLine> {
        let line = |text: &&str| BlockLine { tone: Tone::Bar, text: (*text).to_owned() };
        texts.iter().map(line).collect()
    }

    #[test]
    fn what_was_drawn_is_erased_whatever_became_of_the_terminal() {
        let mut block = Block::default();
        let size = |columns, rows| Size { columns, rows };
        assert_eq!(block.erase(size(80, 24)), "", "there is nothing yet");
        assert_eq!(block.draw(&lines(&["0123456789", "abc"]), false), "0123456789\nabc\n");
        assert_eq!(block.erase(size(80, 24)), "\x1b[2F\x1b[J");
        assert_eq!(block.erase(size(80, 24)), "", "once");
        block.draw(&lines(&["0123456789", "abc"]), false);
        assert_eq!(block.erase(size(4, 24)), "\x1b[4F\x1b[J", "three rows and one");
        block.draw(&lines(&["0123456789", "", "abc"]), false);
        assert_eq!(block.erase(size(4, 3)), "\x1b[2F\x1b[J", "what has left the screen stays there");
    }

    #[test]
    fn colours_are_asked_for() {
        let mut block = Block::default();
        assert_eq!(block.draw(&lines(&["a"]), true), "\x1b[36ma\x1b[0m\n");
        assert!(!block.draw(&lines(&["a"]), false).contains('\x1b'));
    }
}
