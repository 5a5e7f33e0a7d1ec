//! What checks collect: fields whose values cannot be, each with a remedy.

use std::fmt;

use super::{
    de,
    error::{ConfigError, Problem},
    keys::join,
    tree,
};

/// Violated rules, in the order in which they were found.
#[derive(Debug, Default)]
pub struct Findings(Vec<Problem>);

impl Findings {
    /// Unless the rule `holds`, tells of the field at the dotted `path` what is wrong and what to do.
    pub fn require(&mut self, holds: bool, path: &str, finding: impl fmt::Display, remedy: &str) {
        if !holds {
            self.0.push(Problem::new(path, finding.to_string()).help(remedy));
        }
    }

    /// Refuses 0.
    pub fn at_least_one(&mut self, path: &str, value: usize) {
        self.require(value >= 1, path, "must be at least 1, is 0", "give a positive whole number");
    }

    /// Refuses empty text; `what` says what to write.
    pub fn named(&mut self, path: &str, value: &str, what: &str) {
        self.require(!value.trim().is_empty(), path, "is empty", what);
    }

    /// Refuses what is not finite and what does not hold; `range` ends "must be a finite number ...".
    pub fn in_range(&mut self, path: &str, value: f64, holds: bool, range: &str) {
        self.require(
            holds && value.is_finite(),
            path,
            format_args!("must be a finite number {range}, is {value:?}"),
            "write a number in that range",
        );
    }

    /// Refuses a peak rate of `optimizer.lr` below 0.
    pub fn learning_rate(&mut self, group: &str, rate: f64) {
        self.in_range(&format!("optimizer.lr.{group}"), rate, rate >= 0.0, "of at least 0");
    }

    /// A value that the engine carries without knowing its type; tells what is wrong with it as for any other
    /// key.
    pub fn read<T: for<'de> serde::Deserialize<'de>>(
        &mut self,
        path: &str,
        value: &serde_json::Value,
    ) -> Option<T> {
        // JSON is YAML.
        let read = tree::parse(&value.to_string(), path).and_then(|root| de::from_tree(&root));
        let error = match read {
            Ok(value) => return Some(value),
            Err(error) => error,
        };
        self.0.extend(error.problems().iter().cloned().map(|mut problem| {
            problem.place = None;
            problem.path = if problem.path.is_empty() { path.into() } else { join(path, &problem.path) };
            problem
        }));
        None
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn into_problems(self) -> Vec<Problem> {
        self.0
    }

    pub(super) fn into_result(self) -> Result<(), ConfigError> {
        if self.0.is_empty() { Ok(()) } else { Err(ConfigError::Invalid(self.0)) }
    }
}
