//! Prompts of policies: as many places as a sample's images have tokens, then the ids of a text.
//!
//! Of a text the first tokens are kept, as many as `tokenizer_max_length` says. LeRobot pads texts
//! behind; here rows have no padding inside, which is the same to every token that counts.

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

/// What fills the end of a row; nothing attends to it.
const PAD: u32 = 0;

/// The text of a task and a normalised state.
pub(crate) type Wording = fn(&str, &[f32]) -> String;

/// The task on a line of its own.
pub(crate) fn line(task: &str, _state: &[f32]) -> String {
    if task.ends_with('\n') { task.into() } else { format!("{task}\n") }
}

/// Tasks and states to ids.
pub(crate) struct PolicyPrompts {
    tokenizer: Arc<Tokenizer>,
    wording: Wording,
    /// Stands for a token of an image, and shows where one is.
    image: (u32, String),
    vocab: usize,
    image_tokens: usize,
    most: usize,
    template: String,
    images: usize,
}

impl PolicyPrompts {
    /// With the tokenizer in `backbone`, keeping at most so many tokens of a text.
    pub fn from_backbone(
        backbone: &Path,
        outline: &JointOutline,
        wording: Wording,
        most: usize,
        form: &PromptForm<'_>,
    ) -> Result<Self, DataError> {
        let tokenizer = tokenizer_file::read(&backbone.join("tokenizer.json"))?;
        let image = outline.image_token;
        Ok(Self {
            image: (image, tokenizer.id_to_token(image).unwrap_or_else(|| "<image>".into())),
            tokenizer: Arc::new(tokenizer),
            wording,
            vocab: outline.vocab_size,
            image_tokens: outline.image_tokens(),
            most: form.max_text_tokens.map_or(most, |own| own.min(most)),
            template: form.template.into(),
            images: form.images,
        })
    }

    fn text(&self, task: &str, state: &[f32]) -> String {
        (self.wording)(&self.template.replace("{task}", task), state)
    }

    fn ids(&self, text: &str) -> Result<Vec<u32>, String> {
        let encoded = self.tokenizer.encode_fast(text, true).map_err(|error| error.to_string())?;
        Ok(encoded.get_ids().to_vec())
    }
}

impl PromptEncoder for PolicyPrompts {
    fn like(&self, form: &PromptForm<'_>) -> Box<dyn PromptEncoder> {
        Box::new(Self {
            tokenizer: self.tokenizer.clone(),
            image: self.image.clone(),
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
        format!("{}{}", self.image.1.repeat(self.images), self.text(task, &[]))
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
        let (image, shown) = &self.image;
        if told.contains(image) {
            return Err(format!("{shown} is reserved for images; remove it from text {text:?}"));
        }
        if let Some(id) = told.iter().find(|id| **id as usize >= self.vocab) {
            return Err(format!("token {id} is beyond the model's vocabulary of {}", self.vocab));
        }
        let mut ids = vec![*image; images.len() * self.image_tokens];
        ids.append(&mut told);
        Ok(ids)
    }
}
