//! Files of text, read whole up to a bound, wherever they lie.

use std::{borrow::Cow, path::Path};

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
    let refuse = |NotText { found, remedy }| DataError::invalid(path, "text", found, remedy);
    decode(place::read(path, limit)?).map_err(refuse)
}

/// The byte order mark with which some programs begin a text in UTF-8. It is no part of the text.
pub const MARK: &[u8] = "\u{feff}".as_bytes();

/// Letters of a name or a value that an error shows.
const SHOWN: usize = 240;

/// The beginning of what a file says, for errors: it may be megabytes.
pub fn excerpt(text: &str) -> Cow<'_, str> {
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}...", &text[..end]).into(),
        None => text.into(),
    }
}

/// Bytes that are no text in UTF-8.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotText {
    /// What they are.
    pub found: &'static str,
    /// What to do.
    pub remedy: &'static str,
}

impl NotText {
    /// What is wrong with a text that begins with these bytes.
    pub fn of(bytes: &[u8]) -> Self {
        match bytes {
            [0xff, 0xfe, ..] | [0xfe, 0xff, ..] => {
                Self { found: "is UTF-16", remedy: "convert it: `iconv -f UTF-16 -t UTF-8 IN > OUT`" }
            }
            [0x1f, 0x8b, ..] => Self { found: "is compressed (gzip)", remedy: "unpack it: `zcat IN > OUT`" },
            _ => Self { found: "is not UTF-8", remedy: "save the file as UTF-8" },
        }
    }
}

/// The bytes of a file as text, without a byte order mark.
pub fn decode(mut bytes: Vec<u8>) -> Result<String, NotText> {
    let text = if bytes.starts_with(MARK) { bytes.split_off(MARK.len()) } else { bytes };
    String::from_utf8(text).map_err(|error| NotText::of(error.as_bytes()))
}

/// The whole file as one JSON value of type `T`.
pub fn read_json<T: serde::de::DeserializeOwned>(path: &Path) -> Result<T, DataError> {
    serde_json::from_str(&text(path, MAX_METADATA_BYTES)?).map_err(|e| {
        DataError::invalid(path, format!("line {}", e.line()), e.to_string(), "repair or restore the file")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_shows_the_beginning_of_what_is_long() {
        assert_eq!(excerpt("a"), "a");
        let (all, more) = ("\u{e9}".repeat(SHOWN), "\u{e9}".repeat(SHOWN + 1));
        assert_eq!((excerpt(&all), excerpt(&more)), (all.as_str().into(), format!("{all}...").into()));
    }

    #[test]
    fn a_byte_order_mark_is_no_part_of_a_text_and_utf_16_is_named() {
        assert_eq!(decode(b"\xef\xbb\xbf{}".to_vec()).as_deref(), Ok("{}"));
        assert_eq!(decode(b"{}".to_vec()).as_deref(), Ok("{}"));
        assert_eq!(decode(b"\xff\xfe{\0}\0".to_vec()).unwrap_err().found, "is UTF-16");
        assert_eq!(decode(b"\x1f\x8b\x08".to_vec()).unwrap_err().found, "is compressed (gzip)");
        assert_eq!(decode(b"caf\xe9".to_vec()).unwrap_err().found, "is not UTF-8");
    }
}
