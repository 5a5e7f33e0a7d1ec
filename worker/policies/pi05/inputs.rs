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

use std::{path::Path, sync::Arc};

use coxswain_data::DataError;
use coxswain_models::{
    joint::JointOutline,
    pretrained::{
        pictures::ImageShape,
        tokenizer_file::{self, Tokenizer},
    },
    vision_language::{PromptEncoder, PromptForm},
};

use crate::images::{Alignment, PolicyImages};

/// Bins of a state's value.
const BINS: u32 = 256;
/// Tokens that a value of a state takes at most: three digits, and the blank before them.
const VALUE_TOKENS: usize = 4;
/// About as many stand around task and state.
const FRAME_TOKENS: usize = 12;
/// What fills the end of a row; nothing attends to it.
const PAD: u32 = 0;
/// What prompts show where an image is.
const IMAGE: &str = "<image>";

/// Pictures to its input, for the tower that this says.
pub fn images(outline: &JointOutline) -> PolicyImages {
    PolicyImages {
        policy: "pi0.5",
        side: outline.image_side,
        patches: outline.patches,
        alignment: Alignment::Centre,
    }
}

/// About how many tokens a prompt has around its task, with so many values of a state, at most.
pub fn told_tokens(state: usize) -> usize {
    FRAME_TOKENS + VALUE_TOKENS * state
}

/// Tasks and states to ids.
pub struct Pi05Prompts {
    tokenizer: Arc<Tokenizer>,
    image: u32,
    vocab: usize,
    image_tokens: usize,
    most: usize,
    template: String,
    images: usize,
}

impl Pi05Prompts {
    /// With the tokenizer in `backbone`, keeping at most so many tokens of a text.
    pub fn open(
        backbone: &Path,
        outline: &JointOutline,
        most: usize,
        form: &PromptForm<'_>,
    ) -> Result<Self, DataError> {
        Ok(Self {
            tokenizer: Arc::new(tokenizer_file::read(&backbone.join("tokenizer.json"))?),
            image: outline.image_token,
            vocab: outline.vocab_size,
            image_tokens: outline.image_tokens(),
            most: form.max_text_tokens.map_or(most, |own| own.min(most)),
            template: form.template.into(),
            images: form.images,
        })
    }

    fn text(&self, task: &str, state: &[f32]) -> String {
        text(&self.template.replace("{task}", task), state)
    }

    fn ids(&self, text: &str) -> Result<Vec<u32>, String> {
        let encoded = self.tokenizer.encode_fast(text, true).map_err(|error| error.to_string())?;
        Ok(encoded.get_ids().to_vec())
    }
}

impl PromptEncoder for Pi05Prompts {
    fn like(&self, form: &PromptForm<'_>) -> Box<dyn PromptEncoder> {
        Box::new(Self {
            tokenizer: self.tokenizer.clone(),
            template: form.template.into(),
            images: form.images,
            most: form.max_text_tokens.map_or(self.most, |own| own.min(self.most)),
            ..*self
        })
    }

    fn pad(&self) -> u32 {
        PAD
    }

    fn render(&self, task: &str) -> String {
        format!("{}{}", IMAGE.repeat(self.images), self.text(task, &[]))
    }

    fn cut(&self, task: &str) -> usize {
        self.ids(&self.text(task, &[])).map_or(0, |ids| ids.len().saturating_sub(self.most))
    }

    fn encode(&self, task: &str, images: &[ImageShape]) -> Result<Vec<u32>, String> {
        self.encode_observed(task, &[], images)
    }

    fn encode_observed(&self, task: &str, state: &[f32], images: &[ImageShape]) -> Result<Vec<u32>, String> {
        let text = self.text(task, state);
        let mut told = self.ids(&text)?;
        told.truncate(self.most);
        if let Some(id) = told.iter().find(|id| **id as usize >= self.vocab || **id == self.image) {
            return Err(format!("token {id} of {text:?} is none of the model's {} for text", self.vocab));
        }
        let mut ids = vec![self.image; images.len() * self.image_tokens];
        ids.append(&mut told);
        Ok(ids)
    }
}

fn text(task: &str, state: &[f32]) -> String {
    let task = task.trim().replace(['_', '\n'], " ");
    format!("Task: {task}, State: {};\nAction: ", bins(state))
}

/// A state in words: the bin of each value.
pub fn bins(state: &[f32]) -> String {
    state.iter().map(|value| bin(*value).to_string()).collect::<Vec<_>>().join(" ")
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
