//! Where a worker's output goes: `--redirects` and `--tee`.
//!
//! | tee | redirect | stream goes to |
//! |---|---|---|
//! | yes | any | file and console |
//! | no | yes | file |
//! | no | no | console |

use std::collections::BTreeMap;

use super::inputs::SettingText;
use crate::exit::CliError;

/// A set of the two output streams, in `torchrun`'s numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Streams {
    /// Standard output: 1.
    pub stdout: bool,
    /// Standard error: 2.
    pub stderr: bool,
}

impl Streams {
    /// Neither.
    pub const NONE: Self = Self { stdout: false, stderr: false };
    /// Both.
    pub const BOTH: Self = Self { stdout: true, stderr: true };

    fn from_number(text: &str) -> Option<Self> {
        match text.trim() {
            "0" => Some(Self::NONE),
            "1" => Some(Self { stdout: true, stderr: false }),
            "2" => Some(Self { stdout: false, stderr: true }),
            "3" => Some(Self::BOTH),
            _ => None,
        }
    }
}

/// Streams of every local rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PerRank {
    /// One choice for all ranks.
    All(Streams),
    /// For these ranks; neither stream for the others.
    Each(BTreeMap<u32, Streams>),
}

impl PerRank {
    /// Streams of one local rank.
    pub fn streams(&self, local_rank: u32) -> Streams {
        match self {
            Self::All(streams) => *streams,
            Self::Each(ranks) => ranks.get(&local_rank).copied().unwrap_or(Streams::NONE),
        }
    }

    /// Reads `3` or `0:3,1:1`.
    pub fn parse(given: &SettingText) -> Result<Self, CliError> {
        if let Some(all) = Streams::from_number(&given.text) {
            return Ok(Self::All(all));
        }
        let wrong =
            || given.wrong("expected 0, 1, 2 or 3 for all ranks, or RANK:NUMBER pairs such as 0:3,1:1");
        let mut ranks = BTreeMap::new();
        for pair in given.text.split(',') {
            let (rank, number) = pair.split_once(':').ok_or_else(wrong)?;
            let rank = rank.trim().parse().map_err(|_| wrong())?;
            let streams = Streams::from_number(number).ok_or_else(wrong)?;
            if ranks.insert(rank, streams).is_some() {
                return Err(given.wrong(format_args!("local rank {rank} is given twice")));
            }
        }
        Ok(Self::Each(ranks))
    }
}

/// Where one stream goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    /// To its file.
    pub file: bool,
    /// To the console.
    pub console: bool,
}

impl Route {
    /// The table at the top of this file; `shown` is the local-ranks filter.
    pub fn new(redirect: bool, tee: bool, shown: bool) -> Self {
        Self { file: tee || redirect, console: shown && (tee || !redirect) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<PerRank, String> {
        PerRank::parse(&SettingText { text: text.into(), source: "--tee".into() })
            .map_err(|e| e.message.unwrap())
    }

    #[test]
    fn a_number_holds_for_all_ranks_and_pairs_for_the_named_ones() {
        assert_eq!(parse("3").unwrap().streams(7), Streams::BOTH);
        assert_eq!(parse("1").unwrap().streams(0), Streams { stdout: true, stderr: false });
        let each = parse("0:3,2:2").unwrap();
        assert_eq!(each.streams(0), Streams::BOTH);
        assert_eq!(each.streams(1), Streams::NONE);
        assert_eq!(each.streams(2), Streams { stdout: false, stderr: true });
    }

    #[test]
    fn anything_else_is_refused_with_the_flag() {
        for text in ["4", "", "0:4", "a:1", "0:1,0:2", "0-3"] {
            let error = parse(text).unwrap_err();
            assert!(error.starts_with(&format!("--tee {text}: ")), "{error}");
        }
    }

    #[test]
    fn tee_wins_over_redirect_and_the_filter_only_hides() {
        let routes = [
            ((false, false, true), (false, true)),
            ((true, false, true), (true, false)),
            ((false, true, true), (true, true)),
            ((true, true, true), (true, true)),
            ((false, false, false), (false, false)),
            ((false, true, false), (true, false)),
        ];
        for ((redirect, tee, shown), (file, console)) in routes {
            assert_eq!(Route::new(redirect, tee, shown), Route { file, console });
        }
    }
}
