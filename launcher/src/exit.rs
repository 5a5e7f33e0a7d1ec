//! How `cox` ends: typed exit codes, so that a scheduler can tell a typing error from a full GPU.
//!
//! | code | meaning |
//! |---|---|
//! | 0 | done |
//! | 1 | internal error |
//! | 2 | bad usage or configuration |
//! | 3 | bad input: model or data |
//! | 4 | a worker failed |
//! | 5 | out of memory at micro-batch 1 |
//! | 6 | rendezvous failed |
//! | 7 | no progress |
//! | 8 | coordinator lost |
//! | 9 | `cox audit`: samples are missing or were used twice |
//! | 128 + n | ended by signal n: 130 is Ctrl-C, 143 is SIGTERM |

use std::fmt;

use coxswain_proto::v1;
use coxswain_worker::{train::TrainError, trainer::FailureKind};

/// Why a process ends, as its exit code tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// Everything asked for is done.
    Done,
    /// A defect of ours, or of the machine.
    Internal,
    /// The command line or the configuration cannot be used.
    Usage,
    /// The model or the data cannot be used.
    BadInput,
    /// A worker failed for a reason that has no code of its own.
    WorkerFailed,
    /// Not even one sample at a time fits.
    OutOfMemory,
    /// The world was not complete in time, or this process was not let in.
    Rendezvous,
    /// Something stands still.
    NoProgress,
    /// The coordinator is gone and did not come back.
    CoordinatorLost,
    /// The records of a run do not add up.
    Audit,
    /// A signal ended it.
    Signal(i32),
}

impl Exit {
    /// The process's exit code.
    pub fn code(self) -> u8 {
        match self {
            Self::Done => 0,
            Self::Internal => 1,
            Self::Usage => 2,
            Self::BadInput => 3,
            Self::WorkerFailed => 4,
            Self::OutOfMemory => 5,
            Self::Rendezvous => 6,
            Self::NoProgress => 7,
            Self::CoordinatorLost => 8,
            Self::Audit => 9,
            Self::Signal(number) => 128u8.saturating_add(u8::try_from(number).unwrap_or(0)),
        }
    }

    /// How a process ends whose training failed for this kind of reason.
    pub fn of_failure(kind: FailureKind) -> Self {
        match kind {
            FailureKind::OutOfMemory => Self::OutOfMemory,
            FailureKind::BadInput => Self::BadInput,
            FailureKind::Internal => Self::Internal,
            FailureKind::PeerLost | FailureKind::Numeric | FailureKind::Io | FailureKind::Hardware => {
                Self::WorkerFailed
            }
        }
    }

    /// How a process ends whose run failed for this first cause, as the coordinator names it
    /// ([`v1::FailureKind`]).
    pub fn of_cause(kind: i32) -> Self {
        use v1::FailureKind as Kind;
        match Kind::try_from(kind) {
            Ok(Kind::OutOfMemory) => Self::OutOfMemory,
            Ok(Kind::BadInput) => Self::BadInput,
            Ok(Kind::Rendezvous) => Self::Rendezvous,
            Ok(Kind::NoProgress) => Self::NoProgress,
            _ => Self::WorkerFailed,
        }
    }

    /// What a worker's or coordinator's exit code says, read back; a code without a meaning is a failed
    /// worker.
    pub fn of_child(code: i32) -> Self {
        match code {
            0 => Self::Done,
            2 => Self::Usage,
            3 => Self::BadInput,
            5 => Self::OutOfMemory,
            6 => Self::Rendezvous,
            7 => Self::NoProgress,
            8 => Self::CoordinatorLost,
            _ => Self::WorkerFailed,
        }
    }
}

/// A command that did not succeed: what to say, and how to end.
#[derive(Debug)]
pub struct CliError {
    /// The exit code's meaning.
    pub exit: Exit,
    /// What to print, if it has not been printed yet.
    pub message: Option<String>,
}

impl CliError {
    /// Ends with `exit` after printing `message`.
    pub fn new(exit: Exit, message: impl fmt::Display) -> Self {
        Self { exit, message: Some(message.to_string()) }
    }

    /// The command line or the configuration is at fault.
    pub fn usage(message: impl fmt::Display) -> Self {
        Self::new(Exit::Usage, message)
    }

    /// A file is at fault.
    pub fn bad_input(message: impl fmt::Display) -> Self {
        Self::new(Exit::BadInput, message)
    }

    /// This program or its machine is at fault.
    pub fn internal(message: impl fmt::Display) -> Self {
        Self::new(Exit::Internal, message)
    }

    /// Everything there is to say has been said.
    pub fn silent(exit: Exit) -> Self {
        Self { exit, message: None }
    }
}

impl From<coxswain_proto::config::ConfigError> for CliError {
    fn from(error: coxswain_proto::config::ConfigError) -> Self {
        Self::usage(error)
    }
}

impl From<TrainError> for CliError {
    fn from(error: TrainError) -> Self {
        let is_damage = matches!(&error, TrainError::Checkpoint(error) if error.is_damage());
        Self::new(if is_damage { Exit::BadInput } else { Exit::of_failure(error.kind()) }, error)
    }
}

/// What every subcommand returns.
pub type Outcome = Result<(), CliError>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_childs_code_is_passed_on_if_it_means_something() {
        for code in [0, 2, 3, 5, 6, 7, 8] {
            assert_eq!(i32::from(Exit::of_child(code).code()), code);
        }
        assert_eq!(Exit::of_child(1), Exit::WorkerFailed);
        assert_eq!(Exit::of_child(101), Exit::WorkerFailed);
    }

    #[test]
    fn signals_end_as_shells_expect() {
        assert_eq!(Exit::Signal(2).code(), 130);
        assert_eq!(Exit::Signal(15).code(), 143);
    }
}
