//! Answers of the coordinator as text for people and as JSON for programs.

pub mod against;
pub mod audit;
pub mod cache;
pub mod events;
pub mod findings;
pub mod gpu;
pub mod json;
pub mod living;
pub mod log_line;
pub mod names;
pub mod plan;
pub mod runs;
pub mod status;
pub mod store;
pub mod summary;
pub mod table;

use std::{
    fmt::Display,
    io::{self, Write},
    sync::atomic::{AtomicBool, Ordering},
};

use coxswain_proto::human::escaped;

/// Whether an answer could not be written.
static LOST: AtomicBool = AtomicBool::new(false);

/// Whether every answer of this process has been written, or had no reader any more: a command whose answer
/// is lost (a full disk) has not done what it was asked for.
pub fn all_written() -> bool {
    !LOST.load(Ordering::Relaxed)
}

/// Writes an answer to standard output, what a terminal would act on as escapes: it may tell names and texts
/// of other machines and of data sets. False if there is no reader any more (`cox watch | head`), which is
/// no error.
pub fn say(answer: impl Display) -> bool {
    match writeln!(io::stdout().lock(), "{}", escaped(&answer.to_string())) {
        Ok(()) => true,
        Err(error) => {
            if error.kind() != io::ErrorKind::BrokenPipe {
                tracing::error!("the answer cannot be written to standard output: {error}");
                LOST.store(true, Ordering::Relaxed);
            }
            false
        }
    }
}
