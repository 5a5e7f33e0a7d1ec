//! Text to ids and back, by `tokenizer.json` or SentencePiece's `spiece.model`.

use std::path::{Path, PathBuf};

use coxswain_data::DataError;
use tokenizers::Tokenizer;

use super::{config::T5Config, spiece};
use crate::{pretrained::tokenizer_file, text_to_text::TextTokenizer};

/// The fast tokenizer's file.
const FAST: &str = "tokenizer.json";
/// SentencePiece's.
const PIECES: &str = "spiece.model";

/// A checkpoint's tokenizer.
pub struct T5Tokenizer {
    tokenizer: Tokenizer,
    path: PathBuf,
    vocab: usize,
    eos: u32,
}

impl T5Tokenizer {
    /// The file of a model directory that is read; none if it has neither.
    pub fn file(model: &Path) -> Option<PathBuf> {
        [FAST, PIECES].map(|name| model.join(name)).into_iter().find(|path| path.is_file())
    }

    /// Opens the tokenizer of the checkpoint at `model`.
    pub fn from_checkpoint(model: &Path, config: &T5Config) -> Result<Self, DataError> {
        let Some(path) = Self::file(model) else {
            let found = format!("has neither {FAST} nor {PIECES}");
            let remedy = "copy one of them from the checkpoint";
            return Err(DataError::invalid(model, "(directory)", found, remedy));
        };
        let tokenizer = match path.ends_with(FAST) {
            true => tokenizer_file::read(&path)?,
            false => spiece::read(&path)?,
        };
        Ok(Self { tokenizer, path, vocab: config.vocab_size, eos: config.special.eos })
    }
}

impl TextTokenizer for T5Tokenizer {
    fn path(&self) -> &Path {
        &self.path
    }

    fn ids(&self, text: &str, most: usize) -> Result<Vec<u32>, String> {
        // The end is set here: whether a file's post-processor does it depends on who wrote it.
        let encoding = self.tokenizer.encode_fast(text, false).map_err(|error| error.to_string())?;
        let mut ids = encoding.get_ids().to_vec();
        if let Some(id) = ids.iter().find(|id| **id as usize >= self.vocab) {
            return Err(format!(
                "token {id} is beyond the model's vocabulary of {}; use the tokenizer of this checkpoint",
                self.vocab
            ));
        }
        ids.truncate(most.saturating_sub(1));
        ids.push(self.eos);
        Ok(ids)
    }

    fn text(&self, ids: &[u32]) -> Result<String, String> {
        self.tokenizer.decode(ids, true).map_err(|error| error.to_string())
    }
}
