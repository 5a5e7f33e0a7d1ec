//! How many machines, and how often a run may be repaired: `--nnodes`, `--max-restarts`, `--max-rescales`.
//!
//! `torchrun` restarts nothing unless it is told to, because its restart ends every worker and repeats what
//! was trained since the last checkpoint. Ours replaces the worker that was lost and repeats no step, so that
//! a few restarts cost seconds; a worker that cannot live still ends the run after so many attempts.

use std::{fmt, str::FromStr};

use coxswain_proto::limits;

use super::inputs::SettingText;
use crate::exit::CliError;

/// `--nnodes`: `N`, or `MIN:MAX`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Nodes {
    /// Training goes on with this many; at least 1.
    pub min: u32,
    /// More than this many are turned away; at least `min`.
    pub max: u32,
}

impl Nodes {
    /// Always the same number.
    pub fn fixed(nodes: u32) -> Self {
        Self { min: nodes, max: nodes }
    }

    /// Reads a setting.
    pub fn parse(given: &SettingText) -> Result<Self, CliError> {
        given.text.parse().map_err(|why| given.wrong(why))
    }
}

impl FromStr for Nodes {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        const EXPECTED: &str = "expected N, or MIN:MAX with 1 <= MIN <= MAX";
        let (min, max) = text.split_once(':').unwrap_or((text, text));
        match (min.trim().parse(), max.trim().parse()) {
            (Ok(min), Ok(max)) if (1..=max).contains(&min) => Ok(Self { min, max }),
            _ => Err(EXPECTED),
        }
    }
}

impl fmt::Display for Nodes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.min == self.max {
            true => write!(f, "{}", self.max),
            false => write!(f, "{}:{}", self.min, self.max),
        }
    }
}

/// What a run may spend on repairs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budgets {
    /// Workers lost and replaced.
    pub restarts: u32,
    /// Changes of the world's size on purpose; without a bound if absent.
    pub rescales: Option<u32>,
    /// Workers that hold no rank while there are others enough.
    pub spares: u32,
}

impl Budgets {
    /// Reads the settings.
    pub fn parse(
        restarts: Option<SettingText>,
        rescales: Option<SettingText>,
        spares: Option<SettingText>,
    ) -> Result<Self, CliError> {
        let count = |given: SettingText| given.parse("a whole number");
        Ok(Self {
            restarts: restarts.map_or(Ok(limits::MAX_RESTARTS), count)?,
            rescales: rescales.map(count).transpose()?,
            spares: spares.map_or(Ok(0), count)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_of_machines_is_read_and_shown_as_it_is_given() {
        for (text, min, max) in [("3", 3, 3), ("1:4", 1, 4), ("2:2", 2, 2), (" 1 : 2 ", 1, 2)] {
            assert_eq!(text.parse(), Ok(Nodes { min, max }), "{text}");
        }
        assert_eq!(Nodes { min: 1, max: 4 }.to_string(), "1:4");
        assert_eq!(Nodes::fixed(2).to_string(), "2");
        for wrong in ["", "0", "0:2", "3:2", "a", "1:", ":2", "1:2:3", "-1"] {
            assert!(wrong.parse::<Nodes>().is_err(), "{wrong}");
        }
    }
}
