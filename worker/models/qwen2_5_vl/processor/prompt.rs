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

use std::{path::Path, sync::Arc};

use coxswain_data::DataError;

use super::tokenizer::{IMAGE, ModelFacts, QwenTokenizer};

/// Renders and encodes prompts.
pub struct PromptEncoder {
    tokenizer: Arc<QwenTokenizer>,
    template: String,
    head: String,
}

impl PromptEncoder {
    /// Loads tokenizer and chat template of the checkpoint at `model`. `template` is `data.prompt`; `images`
    /// come first.
    pub fn open(model: &Path, facts: ModelFacts, template: &str, images: usize) -> Result<Self, DataError> {
        Ok(Self::with(Arc::new(QwenTokenizer::open(model, facts)?), template, images))
    }

    /// Another template and number of images for the same tokenizer, which is not loaded again.
    pub fn like(&self, template: &str, images: usize) -> Self {
        Self::with(self.tokenizer.clone(), template, images)
    }

    fn with(tokenizer: Arc<QwenTokenizer>, template: &str, images: usize) -> Self {
        let head = format!("{}<|im_start|>user\n{}", tokenizer.system(), IMAGE.repeat(images));
        Self { tokenizer, template: template.to_string(), head }
    }

    /// The id that fills up shorter rows of a batch.
    pub fn pad(&self) -> u32 {
        self.tokenizer.pad()
    }

    /// The prompt for `task` as text, with one placeholder for each image.
    pub fn render(&self, task: &str) -> String {
        let text = self.template.replace("{task}", task);
        format!("{}{text}<|im_end|>\n<|im_start|>assistant\n", self.head)
    }

    /// What stands around the task in every prompt: `data.prompt` between the turns of the chat.
    pub fn template(&self) -> String {
        self.render("{task}")
    }

    /// Token ids of the prompt for `task` with images of these grids.
    pub fn encode(&self, task: &str, grids: &[[u32; 3]]) -> Result<Vec<u32>, String> {
        let ids = self.tokenizer.ids(self.render(task))?;
        let repeats = self.tokenizer.repeats(&ids, grids, &self.template.replace("{task}", task))?;
        let expanded = ids.iter().zip(repeats);
        Ok(expanded.flat_map(|(id, count)| std::iter::repeat_n(*id, count)).collect())
    }
}
