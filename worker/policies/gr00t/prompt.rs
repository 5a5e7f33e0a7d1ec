//! The prompt of a task: one turn of the user's, images first, and nothing behind it.
//!
//! ```text
//! <|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>...put the cup away<|im_end|>\n
//! ```
//!
//! Of a task only letters, digits, blanks and `_` are told, in small letters, where the policy's processor
//! says so. A task without a word is "perform the task".

use std::{path::Path, sync::Arc};

use coxswain_data::DataError;
use coxswain_models::{
    pretrained::{
        pictures::{ImageShape, PatchShape},
        tokenizer_file::{self, Tokenizer},
    },
    vision_language::{PromptEncoder, PromptForm},
};

/// What stands before images and behind the text.
const HEAD: &str = "<|im_start|>user\n";
const TAIL: &str = "<|im_end|>\n";
/// An image.
const IMAGE: &str = "<|vision_start|><|image_pad|><|vision_end|>";
/// What a robot does that is told nothing.
const NOTHING: &str = "Perform the task.";
/// What fills the end of a row; nothing attends to it.
const PAD: u32 = 0;

/// What prompts need to know of the model.
#[derive(Clone, Copy, Debug)]
pub(super) struct PromptModel {
    pub image: u32,
    pub vocab: usize,
    pub patches: PatchShape,
    pub plain_text: bool,
}

/// Tasks to ids.
pub(super) struct Gr00tPrompts {
    tokenizer: Arc<Tokenizer>,
    model: PromptModel,
    template: String,
    images: usize,
    most: Option<usize>,
}

impl Gr00tPrompts {
    /// With the tokenizer in `backbone`.
    pub fn from_backbone(
        backbone: &Path,
        model: PromptModel,
        form: &PromptForm<'_>,
    ) -> Result<Self, DataError> {
        let path = backbone.join("tokenizer.json");
        let tokenizer = tokenizer_file::read(&path)?;
        if tokenizer.token_to_id("<|image_pad|>") != Some(model.image) {
            let found = format!("no token <|image_pad|> with id {}", model.image);
            return Err(DataError::invalid(
                &path,
                "added_tokens",
                found,
                "copy the model's own tokenizer.json",
            ));
        }
        Ok(Self::with(Arc::new(tokenizer), model, form))
    }

    fn with(tokenizer: Arc<Tokenizer>, model: PromptModel, form: &PromptForm<'_>) -> Self {
        let PromptForm { template, images, max_text_tokens } = *form;
        Self { tokenizer, model, template: template.into(), images, most: max_text_tokens }
    }

    fn text(&self, task: &str) -> String {
        let text = self.template.replace("{task}", task);
        let text = if text.is_empty() { NOTHING.into() } else { text };
        if self.model.plain_text { plain(&text) } else { text }
    }

    fn ids(&self, text: &str) -> Result<Vec<u32>, String> {
        let encoded = self.tokenizer.encode_fast(text, false).map_err(|error| error.to_string())?;
        Ok(encoded.get_ids().to_vec())
    }
}

/// As LeRobot formalizes a task.
fn plain(text: &str) -> String {
    let kept = |letter: &char| letter.is_alphanumeric() || letter.is_whitespace() || *letter == '_';
    text.to_lowercase().chars().filter(kept).collect()
}

impl PromptEncoder for Gr00tPrompts {
    fn like(&self, form: &PromptForm<'_>) -> Box<dyn PromptEncoder> {
        Box::new(Self::with(self.tokenizer.clone(), self.model, form))
    }

    fn pad(&self) -> u32 {
        PAD
    }

    fn render(&self, task: &str) -> String {
        format!("{HEAD}{}{}{TAIL}", IMAGE.repeat(self.images), self.text(task))
    }

    fn template(&self) -> String {
        format!("{HEAD}{}{}{TAIL}", IMAGE.repeat(self.images), self.template)
    }

    fn cut(&self, task: &str) -> usize {
        let Some(most) = self.most else { return 0 };
        self.ids(&self.text(task)).map_or(0, |ids| ids.len().saturating_sub(most))
    }

    fn encode(&self, task: &str, images: &[ImageShape]) -> Result<Vec<u32>, String> {
        let text = self.text(task);
        let mut told = self.ids(&text)?;
        if told.contains(&self.model.image) {
            return Err(format!("<|image_pad|> is reserved for images; remove it from text {text:?}"));
        }
        told.truncate(self.most.unwrap_or(told.len()));
        // Special tokens stand around each piece, across which no token reaches.
        let [head, image, tail] = [HEAD, IMAGE, TAIL].map(|piece| self.ids(piece));
        let (mut ids, image, tail) = (head?, image?, tail?);
        for shape in images {
            for &id in &image {
                let count = if id == self.model.image { self.model.patches.tokens(*shape) } else { 1 };
                ids.extend(std::iter::repeat_n(id, count));
            }
        }
        ids.extend(told);
        ids.extend(tail);
        match ids.iter().find(|id| **id as usize >= self.model.vocab) {
            Some(id) => Err(format!("token {id} is beyond the model's vocabulary of {}", self.model.vocab)),
            None => Ok(ids),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::plain;

    #[test]
    fn a_task_is_told_in_small_letters_without_punctuation() {
        assert_eq!(plain("Pick up: the_Red cube, (now)!"), "pick up the_red cube now");
    }
}
