//! The prompt of pi0.5: the task and the state, as text.
//!
//! ```text
//! <bos>Task: put the cup away, State: 127 3 255 -1;\nAction:␣
//! ```
//!
//! Underscores and newlines of a task are blanks. A value of the state, normalised, is the number of the last
//! of 256 bins from -1 to 1 that begins at or below it, and -1 below all of them
//! (`np.digitize(state, np.linspace(-1, 1, 257)[:-1]) - 1`). Only the state's own values are told. Of the ids
//! the first are kept, as many as `tokenizer_max_length` says.
//!
//! LeRobot pads texts behind; here rows have no padding inside, which is the same to every token that counts.

use std::path::Path;

use coxswain_data::DataError;
use coxswain_models::{
    joint::JointOutline,
    pretrained::tokenizer_file::{self, Tokenizer},
};

/// Bins of a state's value.
const BINS: u32 = 256;

/// Tasks and states to ids.
pub(super) struct Pi05Prompts {
    tokenizer: Tokenizer,
    image: u32,
    vocab: usize,
    image_tokens: usize,
    most: usize,
}

impl Pi05Prompts {
    /// With the tokenizer in `backbone`, keeping at most so many tokens of a text.
    pub fn open(backbone: &Path, outline: &JointOutline, most: usize) -> Result<Self, DataError> {
        Ok(Self {
            tokenizer: tokenizer_file::read(&backbone.join("tokenizer.json"))?,
            image: outline.image_token,
            vocab: outline.vocab_size,
            image_tokens: outline.image_tokens(),
            most,
        })
    }

    /// The ids of so many images, and of a task with a normalised state.
    pub fn encode(&self, task: &str, state: &[f32], images: usize) -> Result<Vec<u32>, String> {
        let text = text(task, state);
        let encoded = self.tokenizer.encode_fast(&*text, true).map_err(|error| error.to_string())?;
        let told = encoded.get_ids().iter().take(self.most);
        if let Some(id) = told.clone().find(|id| **id as usize >= self.vocab || **id == self.image) {
            return Err(format!("token {id} of {text:?} is none of the model's {} for text", self.vocab));
        }
        let shown = std::iter::repeat_n(self.image, images * self.image_tokens);
        Ok(shown.chain(told.copied()).collect())
    }
}

fn text(task: &str, state: &[f32]) -> String {
    let task = task.trim().replace(['_', '\n'], " ");
    let bins: Vec<String> = state.iter().map(|value| bin(*value).to_string()).collect();
    format!("Task: {task}, State: {};\nAction: ", bins.join(" "))
}

fn bin(value: f32) -> i64 {
    let begins = |bin: u32| f64::from(bin) * 2.0 / f64::from(BINS) - 1.0;
    (0..BINS).filter(|bin| begins(*bin) <= f64::from(value)).count() as i64 - 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_is_told_in_bins_as_numpy_digitizes_it() {
        for (value, expected) in
            [(-1.5, -1), (-1.0, 0), (-1e-20, 127), (0.0, 128), (0.99, 254), (0.9921875, 255), (4.0, 255)]
        {
            assert_eq!(bin(value), expected, "{value}");
        }
        let text = text(" open_the\ndrawer ", &[0.0, -2.0]);
        assert_eq!(text, "Task: open the drawer, State: 128 -1;\nAction: ");
    }
}
