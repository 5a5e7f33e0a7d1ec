//! What a program reports, and the one way in which it does.

use crate::collective::CollectiveError;

/// What does not hold.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Violation(String);

impl Violation {
    pub(super) fn new(what: String) -> Self {
        Self(what)
    }
}

impl From<CollectiveError> for Violation {
    fn from(error: CollectiveError) -> Self {
        Self(format!("a collective failed: {error}"))
    }
}

/// Returns a violation unless the condition holds.
macro_rules! hold {
    ($condition:expr, $($what:tt)+) => {
        let holds: bool = $condition;
        if !holds {
            return Err($crate::collective::conformance::Violation::new(format!($($what)+)));
        }
    };
}
pub(super) use hold;
