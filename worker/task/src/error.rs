//! What goes wrong inside a task, as far as the engine has to know.

use std::{error::Error, fmt};

/// Whose fault it is; decides the exit code, and whether another try helps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Model, data or configuration cannot be used.
    BadInput,
    /// NaN or infinity.
    Numeric,
    /// A file cannot be read or written.
    Io,
}

/// An error of a task, with its own words.
#[derive(Debug)]
pub struct TaskError {
    /// Whose fault it is.
    pub fault: Fault,
    source: Box<dyn Error + Send + Sync>,
}

impl TaskError {
    /// From the task's own error.
    pub fn new(fault: Fault, source: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self { fault, source: source.into() }
    }

    /// The run file, the model or the data cannot be used.
    pub fn bad_input(source: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self::new(Fault::BadInput, source)
    }

    /// A file cannot be read or written.
    pub fn io(source: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self::new(Fault::Io, source)
    }
}

impl fmt::Display for TaskError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.source.fmt(f)
    }
}

impl Error for TaskError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.source.source()
    }
}
