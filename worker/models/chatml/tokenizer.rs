//! The checkpoint's tokenizer with ChatML's special tokens and Qwen's for images, and what of its chat
//! template is theirs.
//!
//! Templates are not executed: a template of another shape gets Qwen's and a warning, since a model is
//! trained and run with the same prompt either way. Text is encoded first and the single `<|image_pad|>` per
//! image then repeated once per token of the image; special tokens split the text, so this equals encoding
//! the expanded text.

use std::path::Path;

use serde_json::Value;
use tokenizers::{Encoding, Tokenizer};

use super::facts::{ModelFacts, ToolTurns};
use crate::pretrained::{pictures::ImageShape, tokenizer_file};
use coxswain_data::{
    DataError,
    text::{excerpt, read_json, read_text},
};

/// The system turn that published templates begin a chat with that has none.
const SYSTEM: &str = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n";
/// An image in a turn.
pub(super) const IMAGE: &str = "<|vision_start|><|image_pad|><|vision_end|>";
const SPECIAL: [&str; 5] =
    ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"];

/// Encodes text in Qwen's turns.
pub struct ChatMlTokenizer {
    tokenizer: Tokenizer,
    facts: ModelFacts,
    system: &'static str,
    pad: u32,
    begin: u32,
}

impl ChatMlTokenizer {
    /// Loads tokenizer and chat template of the checkpoint at `model`.
    pub fn from_checkpoint(model: &Path, facts: ModelFacts) -> Result<Self, DataError> {
        let path = model.join("tokenizer.json");
        if !path.exists() {
            let remedy = "model.path must be a Hugging Face directory with a fast tokenizer";
            return Err(DataError::invalid(&path, "(file)", "missing", remedy));
        }
        let tokenizer = tokenizer_file::read(&path)?;
        let id = |token: &str| {
            tokenizer.token_to_id(token).ok_or_else(|| {
                let remedy = format!("use the tokenizer of a {} checkpoint", facts.form.family);
                DataError::invalid(&path, format!("token {token}"), "missing", remedy)
            })
        };
        for token in SPECIAL {
            id(token)?;
        }
        if id("<|image_pad|>")? != facts.image_token {
            let found = format!(
                "<|image_pad|> is {}, but config.json says {}",
                id("<|image_pad|>")?,
                facts.image_token
            );
            let remedy = "tokenizer.json and config.json must be from the same checkpoint";
            return Err(DataError::invalid(&path, "image_token_id", found, remedy));
        }
        let (chat, pad) = chat_template(model)?;
        let pad = match pad.as_deref().or(Some("<|endoftext|>")).and_then(|p| tokenizer.token_to_id(p)) {
            Some(pad) => pad,
            None => id("<|im_end|>")?,
        };
        if !chat.contains("<|im_start|>") || !chat.contains("<|vision_start|>") {
            tracing::warn!(model = %model.display(), "chat template is not Qwen's; using Qwen's prompt format");
        }
        let has_own = chat.contains("You are a helpful assistant.");
        let system = if has_own || chat.is_empty() && facts.form.own_system_turn { SYSTEM } else { "" };
        let begin = id("<|im_start|>")?;
        Ok(Self { tokenizer, facts, system, pad, begin })
    }

    /// The id that fills up shorter rows of a batch.
    pub fn pad(&self) -> u32 {
        self.pad
    }

    /// The id that begins a turn.
    pub fn begin(&self) -> u32 {
        self.begin
    }

    /// The id that stands for a token of an image.
    pub fn image_token(&self) -> u32 {
        self.facts.image_token
    }

    /// The system turn of a chat that brings none; empty where the checkpoint's template adds none.
    pub fn system(&self) -> &'static str {
        self.system
    }

    /// How turns of tools are rendered.
    pub fn tool_turns(&self) -> ToolTurns {
        self.facts.form.tool_turns
    }

    /// Encodes rendered text, images as single placeholders.
    pub fn encode(&self, text: String) -> Result<Encoding, String> {
        self.tokenizer.encode(text, false).map_err(|error| error.to_string())
    }

    /// Ids without offsets, which is faster.
    pub fn ids(&self, text: String) -> Result<Vec<u32>, String> {
        let encoding = self.tokenizer.encode_fast(text, false).map_err(|error| error.to_string())?;
        Ok(encoding.get_ids().to_vec())
    }

    /// What a turn may end with: `<|im_end|>`, and `<|endoftext|>` where the tokenizer has it.
    pub fn ends(&self) -> Vec<u32> {
        let ends = ["<|im_end|>", "<|endoftext|>"];
        ends.into_iter().filter_map(|end| self.tokenizer.token_to_id(end)).collect()
    }

    /// Text of these ids, without special tokens.
    pub fn decode(&self, ids: &[u32]) -> Result<String, String> {
        self.tokenizer.decode(ids, true).map_err(|error| error.to_string())
    }

    /// How often each of these ids stands in the model's input: image placeholders as often as their images
    /// have tokens. `text` is what people wrote, for errors.
    pub fn repeats(&self, ids: &[u32], grids: &[ImageShape], text: &str) -> Result<Vec<usize>, String> {
        let placeholders = ids.iter().filter(|id| **id == self.facts.image_token).count();
        if placeholders != grids.len() {
            return Err(format!(
                "image placeholders in the prompt: {placeholders}, images: {}; remove <|image_pad|> from text {:?}",
                grids.len(),
                excerpt(text),
            ));
        }
        if self.tokenizer.token_to_id("<|video_pad|>").is_some_and(|video| ids.contains(&video)) {
            return Err(format!(
                "the prompt has a video placeholder, but only images are supported; remove <|video_pad|> from text {:?}",
                excerpt(text)
            ));
        }
        if let Some(id) = ids.iter().find(|id| **id as usize >= self.facts.vocab) {
            return Err(format!("token {id} is beyond the model's vocabulary of {}", self.facts.vocab));
        }
        let mut counts = grids.iter().map(|grid| self.facts.patches.tokens(*grid));
        let repeats = |id: &u32| if *id == self.facts.image_token { counts.next().unwrap_or(0) } else { 1 };
        Ok(ids.iter().map(repeats).collect())
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
