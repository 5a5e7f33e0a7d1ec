//! What of prompts and chats differs by family, and what of them a checkpoint's `config.json` says.

use std::path::Path;

use coxswain_data::{DataError, text::read_json};
use serde::Deserialize;

use crate::pretrained::{pictures::PatchShape, tokens::TokenIds};

/// Keys of `config.json` and the tokens that they name.
pub(crate) const TOKEN_IDS: TokenIds<'_> = &[
    ("image_token_id", "<|image_pad|>"),
    ("video_token_id", "<|video_pad|>"),
    ("vision_start_token_id", "<|vision_start|>"),
    ("vision_end_token_id", "<|vision_end|>"),
    ("eos_token_id", "<|im_end|>"),
    ("bos_token_id", "<|endoftext|>"),
];

/// How a turn of a tool is rendered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToolTurns {
    /// Like any other: `<|im_start|>tool`.
    AsTheyAre,
    /// As the user's, each between `<tool_response>` and `</tool_response>`; neighbours in one turn.
    AsTheUsers,
}

/// What a family's prompts and chats have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChatMlForm {
    /// Name, for errors.
    pub family: &'static str,
    /// Side of a patch in pixels, where `config.json` does not say.
    pub patch: usize,
    /// Whether a chat that begins otherwise gets a system turn, where no template says.
    pub own_system_turn: bool,
    /// Turns of tools.
    pub tool_turns: ToolTurns,
}

/// What prompts and images need to know of `config.json`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelFacts {
    /// What its family has in common.
    pub form: ChatMlForm,
    /// Placeholder of one image token.
    pub image_token: u32,
    /// Rows of the embedding table.
    pub vocab: usize,
    /// Patch sizes.
    pub patches: PatchShape,
}

impl ModelFacts {
    /// Reads `config.json` of the checkpoint at `model`.
    pub fn read(model: &Path, form: ChatMlForm) -> Result<Self, DataError> {
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
            patch_size: Option<usize>,
            #[serde(default = "two")]
            spatial_merge_size: usize,
            #[serde(default = "two")]
            temporal_patch_size: usize,
        }
        fn two() -> usize {
            2
        }
        let path = model.join("config.json");
        let config: Config = read_json(&path)?;
        let v = config.vision_config;
        let patch = v.patch_size.unwrap_or(form.patch);
        let (merge, frames) = (v.spatial_merge_size, v.temporal_patch_size);
        let patches = PatchShape { patch, merge, frames };
        if patches.columns() * patches.merge == 0 {
            let found =
                format!("patch_size {patch}, spatial_merge_size {merge}, temporal_patch_size {frames}");
            return Err(DataError::invalid(&path, "vision_config", found, "each must be at least 1"));
        }
        let vocab = config.vocab_size.or(config.text_config.and_then(|t| t.vocab_size));
        let vocab = vocab.ok_or_else(|| {
            DataError::invalid(&path, "vocab_size", "missing", "use the checkpoint's own config.json")
        })?;
        Ok(Self { form, image_token: config.image_token_id, vocab, patches })
    }
}
