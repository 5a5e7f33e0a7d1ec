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

/// What plain YAML has for something else than text.
const WORDS: [&str; 9] = ["true", "false", "null", "yes", "no", "on", "off", "y", "n"];

/// A text as a scalar of YAML: as it is where that means itself.
pub fn yaml_scalar(text: &str) -> String {
    let plain = |letter: char| letter.is_alphanumeric() || "_-./".contains(letter);
    let begins = text.starts_with(|first: char| first.is_alphabetic() || "/.".contains(first));
    let is_text = !WORDS.contains(&&*text.to_lowercase()) && text.trim_matches('.').parse::<f64>().is_err();
    match begins && is_text && text.chars().all(plain) {
        true => text.to_owned(),
        // What JSON quotes YAML reads.
        false => serde_json::Value::from(text).to_string(),
    }
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

#[cfg(test)]
mod tests {
    use super::yaml_scalar;

    #[test]
    fn what_yaml_would_read_as_something_else_is_quoted() {
        for text in ["observation.images.top", "/data/set-1", "./lab", "épée", "nothing"] {
            assert_eq!(yaml_scalar(text), text);
        }
        for text in ["/data/a: b", "yes", "Null", ".inf", ".NaN", "1e3", "- a", "#1", "a\nb", "", "it's"] {
            assert_eq!(yaml_scalar(text), serde_json::Value::from(text).to_string());
        }
    }
}
