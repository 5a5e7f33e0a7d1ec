//! Files of text, read whole up to a bound, wherever they lie.

use std::{io, path::Path};

use coxswain_proto::limits::MAX_METADATA_BYTES;

use crate::{error::DataError, place};

/// Bytes of a table in text: JSON lines have some kilobytes for each episode, and there are data sets of
/// 100,000.
const MAX_TABLE_BYTES: u64 = 4 * MAX_METADATA_BYTES;

/// The whole file as text; one that is larger than any table is refused.
pub fn read_text(path: &Path) -> Result<String, DataError> {
    text(path, MAX_TABLE_BYTES)
}

fn text(path: &Path, limit: u64) -> Result<String, DataError> {
    let text = String::from_utf8(place::read(path, limit)?);
    text.map_err(|error| DataError::io(path, "read")(io::Error::new(io::ErrorKind::InvalidData, error)))
}

/// The whole file as one JSON value of type `T`.
pub fn read_json<T: serde::de::DeserializeOwned>(path: &Path) -> Result<T, DataError> {
    parse_json(path, &text(path, MAX_METADATA_BYTES)?)
}

/// The text of a file as one JSON value of type `T`.
pub fn parse_json<T: serde::de::DeserializeOwned>(path: &Path, text: &str) -> Result<T, DataError> {
    serde_json::from_str(text).map_err(|e| {
        DataError::invalid(path, format!("line {}", e.line()), e.to_string(), "repair or restore the file")
    })
}
