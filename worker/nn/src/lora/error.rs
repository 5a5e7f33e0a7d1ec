//! What can be wrong with LoRA settings or a PEFT directory.

use std::{io, path::PathBuf};

/// LoRA settings that do not fit the model, or an adapter directory that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum LoraError {
    /// A setting contradicts itself.
    #[error("{field}: {problem}")]
    Setting {
        /// The setting, as the run file or `adapter_config.json` spells it.
        field: String,
        /// What was found, what was expected, and what to do.
        problem: String,
    },
    /// A pattern is not a regular expression.
    #[error("{field}: {pattern:?} is not a regular expression: {source}")]
    Pattern {
        /// The setting.
        field: String,
        /// The pattern.
        pattern: String,
        /// Where and why.
        source: Box<fancy_regex::Error>,
    },
    /// No module of the model is targeted.
    #[error("{field}: {targets} matches no module of the model; {hint}")]
    NothingMatches {
        /// The setting.
        field: String,
        /// What was asked for.
        targets: String,
        /// Names that are near, or what names look like.
        hint: String,
    },
    /// A target is a module that cannot carry an adapter.
    #[error(
        "{field}: {targets} matches `{module}`, which is {kind}; only linear layers can have an adapter: {remedy}"
    )]
    NotLinear {
        /// The setting.
        field: String,
        /// What was asked for.
        targets: String,
        /// The module.
        module: String,
        /// What it is.
        kind: &'static str,
        /// What to write instead.
        remedy: &'static str,
    },
    /// A file of an adapter directory could not be read or written.
    #[error("{}: {source}; {remedy}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
        /// What to do.
        remedy: &'static str,
    },
    /// A file of an adapter directory is garbled, or asks for what is not supported.
    #[error("{}: {problem}", path.display())]
    Adapter {
        /// The file.
        path: PathBuf,
        /// What was found, what was expected, and what to do.
        problem: String,
    },
}
