//! From a task text to token ids, with image placeholders expanded.
//!
//! One user turn, images first, then the text, then the generation prompt, as VLA trainers prompt Qwen2.5-VL:
//!
//! ```text
//! [<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n]
//! <|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>...TEXT<|im_end|>\n<|im_start|>assistant\n
//! ```
//!
//! The system turn is rendered when the checkpoint's chat template has it, as published ones do.

use std::{ops::Range, path::Path, sync::Arc};

use coxswain_data::DataError;

use super::{
    facts::ModelFacts,
    tokenizer::{ChatMlTokenizer, IMAGE},
};
use crate::{
    pretrained::pictures::ImageShape,
    vision_language::{PromptEncoder, PromptForm},
};

/// What stands behind the text.
const TAIL: &str = "<|im_end|>\n<|im_start|>assistant\n";

/// Renders and encodes prompts.
pub struct ChatMlPrompts {
    tokenizer: Arc<ChatMlTokenizer>,
    template: String,
    head: String,
    limit: Option<TextLimit>,
}

/// A limit of the text's tokens.
struct TextLimit {
    tokens: usize,
    /// Tokens before the text and behind it. Special tokens stand at both of its ends, across which no token
    /// reaches.
    around: [usize; 2],
}

impl TextLimit {
    /// Which of so many tokens of a prompt are text, and how many of them are kept.
    fn apply(&self, tokens: usize) -> (Range<usize>, usize) {
        let [before, behind] = self.around;
        let text = before..tokens.saturating_sub(behind).max(before);
        (text.clone(), text.len().min(self.tokens))
    }
}

impl ChatMlPrompts {
    /// Loads tokenizer and chat template of the checkpoint at `model`.
    pub fn from_checkpoint(
        model: &Path,
        facts: ModelFacts,
        form: &PromptForm<'_>,
    ) -> Result<Self, DataError> {
        Ok(Self::with(Arc::new(ChatMlTokenizer::from_checkpoint(model, facts)?), form))
    }

    fn with(tokenizer: Arc<ChatMlTokenizer>, form: &PromptForm<'_>) -> Self {
        let head = format!("{}<|im_start|>user\n{}", tokenizer.system(), IMAGE.repeat(form.images));
        let tokens = |text: &str| tokenizer.ids(text.to_owned()).map_or(0, |ids| ids.len());
        let limit = form
            .max_text_tokens
            .map(|most| TextLimit { tokens: most, around: [tokens(&head), tokens(TAIL)] });
        Self { tokenizer, template: form.template.to_string(), head, limit }
    }
}

impl PromptEncoder for ChatMlPrompts {
    fn like(&self, form: &PromptForm<'_>) -> Box<dyn PromptEncoder> {
        Box::new(Self::with(self.tokenizer.clone(), form))
    }

    fn pad(&self) -> u32 {
        self.tokenizer.pad()
    }

    fn render(&self, task: &str) -> String {
        let text = self.template.replace("{task}", task);
        format!("{}{text}{TAIL}", self.head)
    }

    fn cut(&self, task: &str) -> usize {
        let Some(limit) = &self.limit else { return 0 };
        let tokens = self.tokenizer.ids(self.render(task)).map_or(0, |ids| ids.len());
        let (text, kept) = limit.apply(tokens);
        text.len() - kept
    }

    fn encode(&self, task: &str, grids: &[ImageShape]) -> Result<Vec<u32>, String> {
        let mut ids = self.tokenizer.ids(self.render(task))?;
        if let Some(limit) = &self.limit {
            let (text, kept) = limit.apply(ids.len());
            ids.drain(text.start + kept..text.end);
        }
        let repeats = self.tokenizer.repeats(&ids, grids, &self.template.replace("{task}", task))?;
        let expanded = ids.iter().zip(repeats);
        Ok(expanded.flat_map(|(id, count)| std::iter::repeat_n(*id, count)).collect())
    }
}
