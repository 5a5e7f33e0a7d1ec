//! What is wrong with a configuration, told so that it can be mended: place, field, finding, remedy.

use std::{fmt, io, sync::Arc};

/// Most problems that are told: a list that is wrong in each of its items has as many.
const MAX_TOLD: usize = 64;
/// Characters of an override that are told.
const LONGEST_OVERRIDE: usize = 200;

/// Where a value comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// A position in a file; line and column count from 1.
    File {
        /// As the user named it.
        name: Arc<str>,
        /// Line.
        line: usize,
        /// Column, in characters.
        column: usize,
    },
    /// A `key=value` of the command line, as it was given.
    Override(Arc<str>),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File { name, line, column } => write!(f, "{name}:{line}:{column}"),
            Self::Override(text) => match text.char_indices().nth(LONGEST_OVERRIDE) {
                Some((end, _)) => write!(f, "override `{}...`", &text[..end]),
                None => write!(f, "override `{text}`"),
            },
        }
    }
}

/// One thing that is wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Where, if the spec came from text.
    pub place: Option<Place>,
    /// The field's dotted path; empty for the document as a whole.
    pub path: String,
    /// What was found, and why it cannot be.
    pub message: String,
    /// What to do.
    pub help: Option<String>,
}

impl Problem {
    pub(super) fn new(path: impl Into<String>, message: impl Into<String>) -> Self {
        Self { place: None, path: path.into(), message: message.into(), help: None }
    }

    pub(super) fn at(mut self, place: &Place) -> Self {
        self.place = Some(place.clone());
        self
    }

    pub(super) fn help(mut self, help: impl Into<String>) -> Self {
        self.help = Some(help.into());
        self
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(place) = &self.place {
            write!(f, "{place}: ")?;
        }
        if !self.path.is_empty() {
            write!(f, "{}: ", self.path)?;
        }
        f.write_str(&self.message)?;
        match &self.help {
            Some(help) => write!(f, "\n    help: {help}"),
            None => Ok(()),
        }
    }
}

/// Why there is no [`RunSpec`](crate::run_spec::RunSpec).
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("{file}: cannot read the configuration: {source}")]
    Unreadable {
        /// The file.
        file: String,
        /// Why.
        source: io::Error,
    },
    /// The file is no configuration.
    #[error("{file}: has more than {limit} bytes, too many for a configuration; is this the right file?")]
    TooLarge {
        /// The file.
        file: String,
        /// The bound.
        limit: u64,
    },
    /// The text was read, and these things are wrong with it; never empty.
    #[error("{}", listed(.0))]
    Invalid(Vec<Problem>),
}

impl ConfigError {
    pub(super) fn one(problem: Problem) -> Self {
        Self::Invalid(vec![problem])
    }

    /// The problems found in the text; none if the file could not be read.
    pub fn problems(&self) -> &[Problem] {
        match self {
            Self::Invalid(problems) => problems,
            Self::Unreadable { .. } | Self::TooLarge { .. } => &[],
        }
    }
}

fn listed(problems: &[Problem]) -> String {
    let mut told: Vec<_> = problems.iter().take(MAX_TOLD).map(Problem::to_string).collect();
    let more = problems.len().saturating_sub(MAX_TOLD);
    told.extend((more > 0).then(|| format!("and {more} more")));
    told.join("\n")
}
