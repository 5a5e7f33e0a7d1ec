//! What an answer that is none says about the next try: the same for workers and launchers, whoever they ask.

use tonic::Code;

/// Whether the same call might be answered in a moment: nobody was there to answer, or whoever answered was ended in the middle of it, which
/// reads as `Unknown`, `Cancelled` or `Internal`. Every other code is a coordinator's considered word.
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
