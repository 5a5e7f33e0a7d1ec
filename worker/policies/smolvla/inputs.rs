//! Frames and tasks as SmolVLA reads them: pictures to patches of a letterboxed square, a task to the ids
//! of its text and a newline behind as many places as its images have tokens.
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

use crate::images::{Alignment, PolicyImages};

/// Pictures to its input, for the tower that this says.
pub fn images(outline: &JointOutline) -> PolicyImages {
    PolicyImages {
        policy: "SmolVLA",
        side: outline.image_side,
        patches: outline.patches,
        alignment: Alignment::End,
    }
}

/// Tasks to ids.
pub struct SmolVlaPrompts {
    tokenizer: Arc<Tokenizer>,
    /// Stands for a token of an image, and shows where one is.
    image: (u32, String),
    vocab: usize,
    tokens: usize,
    most: usize,
    pad: u32,
    template: String,
    images: usize,
}

impl SmolVlaPrompts {
    /// With the tokenizer in `backbone`, keeping at most so many tokens of a text.
    pub fn open(
        backbone: &Path,
        outline: &JointOutline,
        most: usize,
        form: &PromptForm<'_>,
    ) -> Result<Self, DataError> {
        let path = backbone.join("tokenizer.json");
        let tokenizer = tokenizer_file::read(&path)?;
        let image = outline.image_token;
        let Some(shown) = tokenizer.id_to_token(image) else {
            let remedy = "tokenizer and config.json must be of one checkpoint";
            return Err(DataError::invalid(&path, "image_token_id", format!("no token {image}"), remedy));
        };
        let pad = ["<|im_end|>", "<|endoftext|>"]
            .iter()
            .find_map(|token| tokenizer.token_to_id(token))
            .unwrap_or(0);
        Ok(Self {
            tokenizer: Arc::new(tokenizer),
            image: (image, shown),
            vocab: outline.vocab_size,
            tokens: outline.image_tokens(),
            most: form.max_text_tokens.map_or(most, |own| own.min(most)),
            pad,
            template: form.template.into(),
            images: form.images,
        })
    }

    fn text(&self, task: &str) -> String {
        let text = self.template.replace("{task}", task);
        if text.ends_with('\n') { text } else { text + "\n" }
    }

    fn ids(&self, task: &str) -> Result<Vec<u32>, String> {
        let encoded = self.tokenizer.encode_fast(self.text(task), true).map_err(|error| error.to_string())?;
        Ok(encoded.get_ids().to_vec())
    }
}

impl PromptEncoder for SmolVlaPrompts {
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
        self.pad
    }

    fn render(&self, task: &str) -> String {
        format!("{}{}", self.image.1.repeat(self.images), self.text(task))
    }

    fn cut(&self, task: &str) -> usize {
        self.ids(task).map_or(0, |ids| ids.len().saturating_sub(self.most))
    }

    fn encode(&self, task: &str, images: &[ImageShape]) -> Result<Vec<u32>, String> {
        let mut text = self.ids(task)?;
        text.truncate(self.most);
        let (image, shown) = &self.image;
        if text.contains(image) {
            return Err(format!("it stands for an image; remove {shown} from text {:?}", self.text(task)));
        }
        if let Some(id) = text.iter().find(|id| **id as usize >= self.vocab) {
            return Err(format!("token {id} is beyond the model's vocabulary of {}", self.vocab));
        }
        let mut ids = vec![*image; images.len() * self.tokens];
        ids.append(&mut text);
        Ok(ids)
    }
}
