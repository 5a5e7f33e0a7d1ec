//! Decoders panic on garbled bytes: what they were at is then an error like any other.

use std::{any::Any, panic::AssertUnwindSafe};

use crate::error::DataError;

/// Stands for the feature where a decoder does not say which one it was at.
pub const DECODING: &str = "(decoding)";

/// What `read` returns; if it panics, what `blame` makes of that in words. Decoders panic on garbled bytes.
pub fn surviving<V>(
    read: impl FnOnce() -> Result<V, DataError>,
    blame: impl FnOnce(String) -> DataError,
) -> Result<V, DataError> {
    // What is shared is the cache of blocks, which takes finished blocks only.
    std::panic::catch_unwind(AssertUnwindSafe(read)).unwrap_or_else(|panic| {
        Err(blame(format!(
            "a decoder panicked ({}): the data is damaged; write the file again",
            words(panic.as_ref())
        )))
    })
}

/// What a panic says.
pub fn words(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}
