//! One line of a report.

use std::fmt::Display;

use serde::Serialize;

/// What follows from a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Grade {
    /// It was checked, and holds.
    Passed,
    /// It was checked, and does not hold.
    Failed,
    /// There is nothing to hold it against.
    Told,
}

/// Something that was found out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// `machine`, `first`, `speed`, `collectives`, `training`.
    pub section: &'static str,
    /// What was looked at.
    pub what: String,
    /// What was found, with units.
    pub found: String,
    /// What follows.
    pub verdict: Grade,
}

impl Finding {
    /// For information.
    pub fn told(section: &'static str, what: impl Display, found: impl Display) -> Self {
        Self { section, what: what.to_string(), found: found.to_string(), verdict: Grade::Told }
    }

    /// Something that was checked: `Ok` with what was found, `Err` with what is wrong.
    pub fn checked(section: &'static str, what: impl Display, outcome: Result<String, String>) -> Self {
        let (found, verdict) = match outcome {
            Ok(found) => (found, Grade::Passed),
            Err(wrong) => (wrong, Grade::Failed),
        };
        Self { section, what: what.to_string(), found, verdict }
    }

    /// Whether it was checked and does not hold.
    pub fn failed(&self) -> bool {
        self.verdict == Grade::Failed
    }
}
