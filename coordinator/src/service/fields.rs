//! Fields of wire messages: what no value of a kind may be, and how an error names where it stood.

use std::time::Duration;

use coxswain_proto::{
    human::escaped,
    limits::{MAX_COUNT, MAX_NAME_BYTES, MAX_SHORT_NAME_BYTES, MAX_STEP_TIME},
};
use tonic::Status;

/// A field that cannot be what it says.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {problem}")]
pub struct FieldError {
    field: String,
    problem: String,
}

impl FieldError {
    /// What is wrong with a field.
    pub fn new(field: impl Into<String>, problem: impl Into<String>) -> Self {
        Self { field: field.into(), problem: problem.into() }
    }

    /// This error as seen from a message that contains this one.
    pub fn below(self, field: impl std::fmt::Display) -> Self {
        Self { field: format!("{field}.{}", self.field), ..self }
    }
}

impl From<FieldError> for Status {
    fn from(error: FieldError) -> Self {
        Self::invalid_argument(error.to_string())
    }
}

/// A value, or the field that cannot be one.
pub type FieldResult<T> = Result<T, FieldError>;

/// The time of a step, or of a part of one.
pub fn milliseconds(field: &str, ms: f64) -> FieldResult<Duration> {
    let time = Duration::try_from_secs_f64(ms / 1e3).ok().filter(|time| *time <= MAX_STEP_TIME);
    time.ok_or_else(|| FieldError::new(field, format!("{ms:?} ms is not a possible step time")))
}

/// Bytes, samples, tokens.
pub fn count(field: &str, count: u64) -> FieldResult<u64> {
    match count <= MAX_COUNT {
        true => Ok(count),
        false => Err(FieldError::new(field, format!("{count} is above the maximum of {MAX_COUNT}"))),
    }
}

/// A name, which is kept and shown: what a terminal would act on becomes an escape.
pub fn name(field: &str, name: String) -> FieldResult<String> {
    up_to(MAX_NAME_BYTES, field, name)
}

/// A host's or a device's name, of which status tells one for every rank.
pub fn short_name(field: &str, name: String) -> FieldResult<String> {
    up_to(MAX_SHORT_NAME_BYTES, field, name)
}

fn up_to(most: usize, field: &str, name: String) -> FieldResult<String> {
    match name.len() <= most {
        true => Ok(escaped(&name).into_owned()),
        false => Err(FieldError::new(field, format!("has {} bytes; at most {most} are allowed", name.len()))),
    }
}

/// A list of so many.
pub fn at_most(most: usize, field: &str, found: usize) -> FieldResult<()> {
    match found <= most {
        true => Ok(()),
        false => Err(FieldError::new(field, format!("has {found} entries; at most {most} are allowed"))),
    }
}

/// Something must stand there.
pub fn filled(field: &str, value: &str) -> FieldResult<()> {
    if value.is_empty() { Err(FieldError::new(field, "is empty")) } else { Ok(()) }
}

/// The value of an enum that this version does not have.
pub fn unknown(field: &str, value: i32) -> FieldError {
    FieldError::new(field, format!("{value} is unknown to this version"))
}

/// The first `limit` bytes of a text, at a character's border; what a terminal would act on becomes an
/// escape.
pub fn cut(mut text: String, limit: usize) -> String {
    let end = text.floor_char_boundary(limit);
    text.truncate(end);
    escaped(&text).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_and_counts_that_cannot_be_are_refused() {
        for ms in [f64::NAN, -1.0, f64::INFINITY, 1.5e22, 1e3 * 86_401.0] {
            assert!(milliseconds("total_ms", ms).is_err(), "{ms}");
        }
        assert_eq!(milliseconds("total_ms", 1500.0), Ok(Duration::from_millis(1500)));
        assert!(count("tokens", u64::MAX).is_err() && count("tokens", MAX_COUNT).is_ok());
    }

    #[test]
    fn names_are_no_messages() {
        let error = name("host", "x".repeat(MAX_NAME_BYTES + 1)).unwrap_err();
        assert_eq!(error.to_string(), "host: has 4097 bytes; at most 4096 are allowed");
        let error = short_name("host", "x".repeat(MAX_SHORT_NAME_BYTES + 1)).unwrap_err();
        assert_eq!(error.to_string(), "host: has 256 bytes; at most 255 are allowed");
    }

    #[test]
    fn what_a_terminal_would_act_on_is_shown() {
        assert_eq!(name("host", "a\u{1b}]0;b\u{7}".into()).unwrap(), r"a\u001b]0;b\u0007");
        assert_eq!(cut("lost\r\nall".into(), 99), "lost\\u000d\nall");
    }

    #[test]
    fn long_texts_are_cut_at_a_character() {
        assert_eq!(cut("a\u{f1}b".into(), 2), "a");
        assert_eq!(cut("a\u{f1}b".into(), 9), "a\u{f1}b");
    }
}
