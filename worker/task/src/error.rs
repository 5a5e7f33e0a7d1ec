//! What goes wrong inside a task, as far as the engine has to know.

use std::{error::Error, fmt};

use coxswain_data::DataError;

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

    /// The run file, the model or the data cannot be used; unless that is a network's fault, and may pass.
    pub fn bad_input(source: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        let source = source.into();
        let fault = if passes(&*source) { Fault::Io } else { Fault::BadInput };
        Self { fault, source }
    }

    /// A file cannot be read or written.
    pub fn io(source: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self::new(Fault::Io, source)
    }
}

/// Whether an error comes of data that another try may find.
fn passes(error: &(dyn Error + 'static)) -> bool {
    let data = error.downcast_ref::<DataError>();
    data.is_some_and(DataError::passes) || error.source().is_some_and(passes)
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
