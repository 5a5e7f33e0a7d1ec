//! From a task text to token ids, with image placeholders expanded.
//!
//! One user turn, images first, then the text, then the generation prompt, as VLA trainers prompt Qwen2.5-VL:
//!
//! ```text
//! [<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n]
//! <|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>...TEXT<|im_end|>\n<|im_start|>assistant\n
//! ```
//!
//! The system turn is rendered when the checkpoint's chat template has it, as published ones do. Templates
//! are not executed: a template of another shape gets this one and a warning, since a policy is trained and
//! run with the same prompt either way. Text is encoded first and the single `<|image_pad|>` per image then
//! repeated once per token of the image; special tokens split the text, so this equals encoding the expanded
//! text.

use std::path::Path;

use serde::Deserialize;
use serde_json::Value;
use tokenizers::Tokenizer;

use super::shape::PatchShape;
use coxswain_data::error::{DataError, read_json, read_text};

const SYSTEM: &str = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n";
const IMAGE: &str = "<|vision_start|><|image_pad|><|vision_end|>";
const SPECIAL: [&str; 5] =
    ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"];

/// What prompts and images need to know of `config.json`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelFacts {
    /// Placeholder of one image token.
    pub image_token: u32,
    /// Rows of the embedding table.
    pub vocab: usize,
    /// Patch sizes.
    pub patches: PatchShape,
}

impl ModelFacts {
    /// Reads `config.json` of the checkpoint at `model`.
    pub fn read(model: &Path) -> Result<Self, DataError> {
        #[derive(Deserialize)]
        struct Config {
            image_token_id: u32,
            vocab_size: Option<usize>,
            text_config: Option<Text>,
            vision_config: Vision,
        }
        #[derive(Deserialize)]
        struct Text {
            vocab_size: Option<usize>,
        }
        #[derive(Deserialize)]
        struct Vision {
            #[serde(default = "fourteen")]
            patch_size: usize,
            #[serde(default = "two")]
            spatial_merge_size: usize,
            #[serde(default = "two")]
            temporal_patch_size: usize,
        }
        fn fourteen() -> usize {
            14
        }
        fn two() -> usize {
            2
        }
        let path = model.join("config.json");
        let config: Config = read_json(&path)?;
        let v = config.vision_config;
        let patches =
            PatchShape { patch: v.patch_size, merge: v.spatial_merge_size, frames: v.temporal_patch_size };
        if patches.columns() * patches.merge == 0 {
            let found = format!("{patches:?}");
            return Err(DataError::invalid(&path, "vision_config", found, "sizes are at least 1"));
        }
        let vocab = config.vocab_size.or(config.text_config.and_then(|t| t.vocab_size));
        let vocab = vocab.ok_or_else(|| {
            DataError::invalid(&path, "vocab_size", "missing", "use the checkpoint's own config.json")
        })?;
        Ok(Self { image_token: config.image_token_id, vocab, patches })
    }
}

/// Renders and encodes prompts.
pub struct PromptEncoder {
    tokenizer: Tokenizer,
    template: String,
    head: String,
    facts: ModelFacts,
    pad: u32,
}

impl PromptEncoder {
    /// Loads tokenizer and chat template of the checkpoint at `model`. `template` is `data.prompt`; `images`
    /// come first.
    pub fn open(model: &Path, facts: ModelFacts, template: &str, images: usize) -> Result<Self, DataError> {
        let path = model.join("tokenizer.json");
        if !path.exists() {
            let remedy = "model.path must be a Hugging Face directory with a fast tokenizer";
            return Err(DataError::invalid(&path, "(file)", "missing", remedy));
        }
        let garbled = |e: tokenizers::Error| {
            DataError::invalid(&path, "(file)", e.to_string(), "download the checkpoint's tokenizer again")
        };
        let mut tokenizer = Tokenizer::from_file(&path).map_err(garbled)?;
        // The file keeps the truncation and padding of whoever called the tokenizer before it was saved.
        // Transformers sets both anew in every call, and prompts are encoded with neither.
        tokenizer.with_truncation(None).map_err(garbled)?.with_padding(None);
        let id = |token: &str| {
            tokenizer.token_to_id(token).ok_or_else(|| {
                let remedy = "use the tokenizer of a Qwen2.5-VL checkpoint";
                DataError::invalid(&path, format!("token {token}"), "missing", remedy)
            })
        };
        for token in SPECIAL {
            id(token)?;
        }
        if id("<|image_pad|>")? != facts.image_token {
            let found =
                format!("<|image_pad|> is {}, config.json says {}", id("<|image_pad|>")?, facts.image_token);
            let remedy = "tokenizer and config.json must be of one checkpoint";
            return Err(DataError::invalid(&path, "image_token_id", found, remedy));
        }
        let (chat, pad) = chat_template(model)?;
        let pad = match pad.as_deref().or(Some("<|endoftext|>")).and_then(|p| tokenizer.token_to_id(p)) {
            Some(pad) => pad,
            None => id("<|im_end|>")?,
        };
        if !chat.contains("<|im_start|>") || !chat.contains("<|vision_start|>") {
            tracing::warn!(model = %model.display(), "chat template is not Qwen's; prompting in Qwen's shape");
        }
        let system =
            if chat.is_empty() || chat.contains("You are a helpful assistant.") { SYSTEM } else { "" };
        let head = format!("{system}<|im_start|>user\n{}", IMAGE.repeat(images));
        Ok(Self { tokenizer, template: template.to_string(), head, facts, pad })
    }

    /// The id that fills up shorter rows of a batch.
    pub fn pad(&self) -> u32 {
        self.pad
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
        let prompt = self.render(task);
        let encoding = self.tokenizer.encode_fast(prompt, false).map_err(|e| e.to_string())?;
        let ids = encoding.get_ids();
        let placeholders = ids.iter().filter(|id| **id == self.facts.image_token).count();
        if placeholders != grids.len() {
            return Err(format!(
                "the prompt has {placeholders} image placeholders for {} images; remove <|image_pad|> from text {:?}",
                grids.len(),
                self.template.replace("{task}", task)
            ));
        }
        if let Some(id) = ids.iter().find(|id| **id as usize >= self.facts.vocab) {
            return Err(format!("token {id} is beyond the model's vocabulary of {}", self.facts.vocab));
        }
        let mut counts = grids.iter().map(|grid| self.facts.patches.tokens(*grid));
        let repeat = |id: &u32| {
            let count = if *id == self.facts.image_token { counts.next().unwrap_or(0) } else { 1 };
            std::iter::repeat_n(*id, count)
        };
        Ok(ids.iter().flat_map(repeat).collect())
    }
}

/// The chat template's text (empty if there is none) and the padding token, wherever this checkpoint keeps
/// them.
fn chat_template(model: &Path) -> Result<(String, Option<String>), DataError> {
    let path = model.join("tokenizer_config.json");
    let config: Value = if path.exists() { read_json(&path)? } else { Value::Null };
    let text =
        |v: &Value| v.as_str().or_else(|| v.get("content").and_then(Value::as_str)).map(str::to_string);
    let pad = config.get("pad_token").and_then(text);
    let jinja = model.join("chat_template.jinja");
    if jinja.exists() {
        return Ok((read_text(&jinja)?, pad));
    }
    let own = model.join("chat_template.json");
    let holder: Value = if own.exists() { read_json(&own)? } else { config };
    // Either one template, or a list of named ones.
    let template = match holder.get("chat_template") {
        Some(Value::Array(named)) => named.iter().find_map(|t| t.get("template").and_then(text)),
        Some(one) => text(one),
        None => None,
    };
    Ok((template.unwrap_or_default(), pad))
}
