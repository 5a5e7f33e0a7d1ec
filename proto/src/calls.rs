//! What workers and launchers have in common as callers: how they show their token, and what an answer that
//! is none says about the next try, and when that is.

use std::time::Duration;

use tonic::{
    Code, Status,
    metadata::{Ascii, MetadataValue, errors::InvalidMetadataValue},
};

/// In an answer's metadata: milliseconds after which to ask again, by gRPC's retry design.
pub const PUSHBACK: &str = "grpc-retry-pushback-ms";

/// The value of `authorization` that shows a token. It is marked as sensitive: `Debug` does not print it, and
/// HTTP/2 keeps it out of its tables.
pub fn bearer(token: &str) -> Result<MetadataValue<Ascii>, InvalidMetadataValue> {
    let mut value: MetadataValue<Ascii> = format!("Bearer {token}").parse()?;
    value.set_sensitive(true);
    Ok(value)
}

/// Pauses between tries: each twice as long as the one before, up to the longest. A server that comes back is
/// found soon, and one that stays away is not asked all the time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pauses {
    first: Duration,
    longest: Duration,
    next: Duration,
}

impl Pauses {
    /// From `first` to `longest`.
    pub const fn new(first: Duration, longest: Duration) -> Self {
        Self { first, longest, next: first }
    }

    /// The pause before the next try.
    pub fn upcoming(&self) -> Duration {
        self.next
    }

    /// Takes the pause before the next try; the one after it is longer.
    pub fn take(&mut self) -> Duration {
        let pause = self.next;
        self.next = (pause * 2).min(self.longest);
        pause
    }

    /// The coordinator has answered: the next silence is another one.
    pub fn reset(&mut self) {
        self.next = self.first;
    }
}

/// When to ask again, where a coordinator that has too many readers has said so.
pub fn pushback(status: &Status) -> Option<Duration> {
    let pause = status.metadata().get(PUSHBACK)?.to_str().ok()?.parse().ok()?;
    (status.code() == Code::ResourceExhausted).then(|| Duration::from_millis(pause))
}

/// Whether the same call might be answered in a moment: no server was there to answer, or it was ended in the
/// middle of it, which reads as `Unknown`, `Cancelled` or `Internal`. Every other code is a coordinator's
/// considered word.
pub fn may_answer_later(code: Code) -> bool {
    matches!(
        code,
        Code::Unavailable | Code::DeadlineExceeded | Code::Cancelled | Code::Unknown | Code::Internal
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_shown_to_the_coordinator_alone() {
        let value = bearer("hunter2").unwrap();
        assert_eq!(value.to_str().unwrap(), "Bearer hunter2");
        assert!(value.is_sensitive());
        assert!(!format!("{value:?}").contains("hunter2"), "{value:?}");
        bearer("two\nlines").unwrap_err();
    }

    #[test]
    fn pauses_grow_to_the_longest_and_begin_anew_after_an_answer() {
        let ms = Duration::from_millis;
        let mut pauses = Pauses::new(ms(20), ms(100));
        assert_eq!([0; 4].map(|_| pauses.take()), [ms(20), ms(40), ms(80), ms(100)]);
        assert_eq!(pauses.upcoming(), ms(100));
        pauses.reset();
        assert_eq!(pauses.take(), ms(20));
    }

    #[test]
    fn who_is_told_to_wait_knows_how_long() {
        let mut status = Status::resource_exhausted("many read");
        assert_eq!(pushback(&status), None);
        status.metadata_mut().insert(PUSHBACK, "1500".parse().unwrap());
        assert_eq!(pushback(&status), Some(Duration::from_millis(1500)));
    }

    #[test]
    fn refusals_are_not_repeated_and_silence_is() {
        for refusal in [
            Code::InvalidArgument,
            Code::NotFound,
            Code::AlreadyExists,
            Code::FailedPrecondition,
            Code::ResourceExhausted,
            Code::Unauthenticated,
            Code::Unimplemented,
        ] {
            assert!(!may_answer_later(refusal), "{refusal:?}");
        }
        for silence in
            [Code::Unavailable, Code::DeadlineExceeded, Code::Cancelled, Code::Unknown, Code::Internal]
        {
            assert!(may_answer_later(silence), "{silence:?}");
        }
    }
}
