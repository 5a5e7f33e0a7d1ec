//! One setting from several places, and errors that name the place it came from.

use std::{fmt, str::FromStr};

use crate::exit::CliError;

/// Reads environment variables; a function, so that tests need not touch the process's own.
pub type Env<'a> = &'a dyn Fn(&str) -> Option<String>;

/// The process's environment. A variable that is not Unicode counts as absent, as one that is empty.
pub fn process_env(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// The text of a setting and who gave it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SettingText {
    /// As given.
    pub text: String,
    /// `--nnodes`, `PET_NNODES`, `SLURM_NNODES`.
    pub source: String,
}

impl SettingText {
    /// What `name` (with dashes, without the leading ones) was set to: the flag, or else `PET_<NAME>`.
    pub fn flag_or_pet(name: &str, flag: Option<&String>, env: Env<'_>) -> Option<Self> {
        let pet = format!("PET_{}", name.replace('-', "_").to_uppercase());
        match flag {
            Some(text) => Some(Self { text: text.clone(), source: format!("--{name}") }),
            None => Self::variable(&pet, env),
        }
    }

    /// What the variable `name` is set to.
    pub fn variable(name: &str, env: Env<'_>) -> Option<Self> {
        env(name).map(|text| Self { text, source: name.to_owned() })
    }

    /// Parses the text; `expected` completes "expected ...".
    pub fn parse<T: FromStr>(&self, expected: &str) -> Result<T, CliError> {
        self.text.trim().parse().map_err(|_| self.wrong(format_args!("expected {expected}")))
    }

    /// An error about this setting.
    pub fn wrong(&self, what: impl fmt::Display) -> CliError {
        CliError::usage(format!("{} {}: {what}", self.source, self.text))
    }
}

/// `true`/`1` or `false`/`0`.
pub fn boolean(given: &SettingText) -> Result<bool, CliError> {
    match given.text.trim().to_ascii_lowercase().as_str() {
        "true" | "1" | "t" | "yes" | "y" => Ok(true),
        "false" | "0" | "f" | "no" | "n" => Ok(false),
        _ => Err(given.wrong("expected true or false")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flag_beats_its_variable_and_errors_name_the_one_that_counts() {
        let env = |name: &str| (name == "PET_NODE_RANK").then(|| "x".to_owned());
        let flag = "1".to_owned();
        assert_eq!(SettingText::flag_or_pet("node-rank", Some(&flag), &env).unwrap().source, "--node-rank");
        let given = SettingText::flag_or_pet("node-rank", None, &env).unwrap();
        let error = given.parse::<u32>("a whole number").unwrap_err().message.unwrap();
        assert_eq!(error, "PET_NODE_RANK x: expected a whole number");
        assert_eq!(SettingText::flag_or_pet("nnodes", None, &env), None);
    }
}
