//! Which lines of the coordinator's log stay on the console, and which only pass.

use std::io::IsTerminal;

use clap::Args;

use crate::{
    launch::inputs::process_env,
    render::log_line::{self, LogLine},
};

/// Flags that say how a run is shown.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Console")]
pub struct ConsoleFlags {
    /// Print a line every N steps on the console (the coordinator's log: train.log_every)
    #[arg(long, alias = "log_every", value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub log_every: Option<u64>,
    /// Print every line of the log without the live display, as when standard error is not a terminal
    #[arg(long)]
    pub plain: bool,
}

/// How a run is shown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mode {
    /// A block at the bottom of the terminal follows the run.
    pub living: bool,
    /// A line for each so many steps; absent: for every step, or where there is a block for none.
    pub every: Option<u64>,
}

/// Where a line of the log goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Visibility {
    /// It stays.
    Screen,
    /// It is seen in the block until others follow.
    Block,
    /// The log has it.
    Nowhere,
}

impl Mode {
    /// How a run is shown on this process's standard error. A terminal that calls itself dumb can move no
    /// cursor, and one without a size (`docker run -t` without a terminal of its own) has no bottom.
    pub fn of_stderr(flags: &ConsoleFlags) -> Self {
        let dumb = process_env("TERM").is_some_and(|terminal| terminal == "dumb");
        let sized = terminal_size::terminal_size_of(std::io::stderr()).is_some();
        Self::choose(flags, std::io::stderr().is_terminal() && sized && !dumb)
    }

    /// How a run is shown on a terminal, or on something else.
    pub fn choose(flags: &ConsoleFlags, terminal: bool) -> Self {
        Self { living: terminal && !flags.plain, every: flags.log_every }
    }

    /// Where a line goes. What is no line of a log stays.
    pub fn place(self, line: &str) -> Visibility {
        if let Some((committed, total)) = log_line::committed(line) {
            return match self.every {
                Some(every) if committed.is_multiple_of(every) || committed == total => Visibility::Screen,
                None if !self.living => Visibility::Screen,
                _ => Visibility::Nowhere,
            };
        }
        match LogLine::parse(line) {
            Some(line) if self.living && self.every.is_none() && !line.warns() => match line.tag {
                // A membership after a fault, and the first one.
                "workers" if line.text.starts_with("generation ") => Visibility::Screen,
                "workers" | "save" | "cache" | "note" => Visibility::Block,
                "memory" => Visibility::Nowhere,
                _ => Visibility::Screen,
            },
            _ => Visibility::Screen,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(committed: u64) -> String {
        format!("17:15:17  step    {committed:>3}/150  epoch 0  loss 1.8115    grad 4.5836")
    }

    #[test]
    fn a_block_leaves_the_screen_to_what_matters() {
        let mode = Mode::choose(&ConsoleFlags::default(), true);
        let place = |line: &str| mode.place(line);
        for stays in [
            "17:15:17  fail    warning: lost: rank 1 on node-a",
            "17:15:17  workers generation 2: 2 of 2 workers, from step 10",
            "17:15:17  workers warning: rank 1 stands still",
            "17:15:17  save    warning: checkpoint at step 3 was not written; training continues",
            "17:15:17  step    warning: 3/12  epoch 0  left out: its loss was not finite in either of two attempts",
            "17:15:17  run     finished: all steps are committed",
            "[rank0] thread 'main' panicked",
            "the coordinator died (SIGKILL) and is started again",
        ] {
            assert_eq!(place(stays), Visibility::Screen, "{stays}");
        }
        assert_eq!(place("17:15:17  save    checkpoint at step 20: a, 13.0 MiB"), Visibility::Block);
        assert_eq!(place("17:15:17  workers rank 1 joined from node-b"), Visibility::Block);
        assert_eq!(place("17:15:17  memory  rank  host"), Visibility::Nowhere);
        assert_eq!(place(&step(10)), Visibility::Nowhere);
    }

    #[test]
    fn steps_are_told_as_often_as_asked_and_the_last_one_always() {
        let mode = |log_every, plain, terminal| Mode::choose(&ConsoleFlags { log_every, plain }, terminal);
        for terminal in [true, false] {
            let places = [9, 10, 20, 149, 150].map(|at| mode(Some(10), false, terminal).place(&step(at)));
            let (told, held) = (Visibility::Screen, Visibility::Nowhere);
            assert_eq!(places, [held, told, told, held, told]);
        }
        assert_eq!(mode(Some(10), false, true).place("17:15:17  memory  rank"), Visibility::Screen);
        for plain in [mode(None, true, true), mode(None, false, false)] {
            assert!(!plain.living);
            assert_eq!(
                (plain.place(&step(7)), plain.place("17:15:17  memory  rank")),
                (Visibility::Screen, Visibility::Screen)
            );
        }
        let json = r#"{"target":"coxswain::step","committed":7,"total":150}"#;
        assert_eq!(mode(Some(10), false, false).place(json), Visibility::Nowhere);
    }
}
