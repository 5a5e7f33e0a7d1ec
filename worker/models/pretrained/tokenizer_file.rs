//! `tokenizer.json`, read by Hugging Face's `tokenizers`.

use std::{panic::AssertUnwindSafe, path::Path};

use coxswain_data::{DataError, surviving::words};
use coxswain_proto::{bounded, limits::MAX_TOKENIZER_BYTES};
pub use tokenizers::Tokenizer;

/// The tokenizer in the file at `path`.
///
/// # Errors
///
/// One that names the file, where it cannot be read or is no tokenizer.
pub fn read(path: &Path) -> Result<Tokenizer, DataError> {
    let garbled = |found: String| {
        DataError::invalid(path, "(file)", found, "copy the checkpoint's tokenizer.json again")
    };
    let bytes = bounded::read(path, MAX_TOKENIZER_BYTES).map_err(DataError::io(path, "read"))?;
    // The library panics where the decoder is none that it knows.
    let read = std::panic::catch_unwind(AssertUnwindSafe(|| Tokenizer::from_bytes(bytes)));
    let mut tokenizer = match read {
        Ok(tokenizer) => tokenizer.map_err(|error| garbled(error.to_string()))?,
        Err(panic) => return Err(garbled(words(panic.as_ref()).to_owned())),
    };
    // The file keeps the truncation and padding that were set when the tokenizer was saved. Transformers sets
    // both anew in every call, and texts are encoded with neither.
    tokenizer.with_truncation(None).map_err(|error| garbled(error.to_string()))?.with_padding(None);
    Ok(tokenizer)
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_decoder_that_the_library_does_not_know_is_an_error_that_names_the_file() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let model = r#"{"type":"BPE","vocab":{"a":0},"merges":[]}"#;
        for decoder in ["null", "5", r#"{"type":"New"}"#] {
            let text = format!(
                r#"{{"version":"1.0","truncation":null,"padding":null,"added_tokens":[],"normalizer":null,
                    "pre_tokenizer":null,"post_processor":null,"decoder":{decoder},"model":{model}}}"#
            );
            std::fs::write(file.path(), text).unwrap();
            match super::read(file.path()) {
                Ok(_) => assert_eq!(decoder, "null"),
                Err(error) => {
                    let message = error.to_string();
                    assert!(
                        decoder != "null" && message.contains(file.path().to_str().unwrap()),
                        "{message}"
                    );
                }
            }
        }
    }
}
